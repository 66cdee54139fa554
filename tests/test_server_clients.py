"""A program that people use with OpenAI's API, unmodified: LangChain, where it is installed."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from serving import TOOL_TEMPLATE, Server, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("clients"), template=TOOL_TEMPLATE) as running:
        yield running


@pytest.mark.filterwarnings("default")
def test_langchain(server: Server) -> None:
    """A chain, a stream, embeddings, and an agent's loop that calls a tool."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own deprecations
        langchain = pytest.importorskip("langchain_openai", reason="needs pip install langchain-openai")
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    model = langchain.ChatOpenAI(
        model="demo", base_url=f"{server.url}/v1", api_key="none", temperature=0, max_tokens=80, max_retries=0
    )
    whole = model.invoke("Tell me of the sea.", max_tokens=8)
    assert whole.content
    assert whole.usage_metadata["output_tokens"] == 8
    pieces = [chunk.content for chunk in model.stream("Tell me of the sea.", max_tokens=8)]
    assert "".join(pieces) == whole.content

    @tool
    def weather(city: str, days: int) -> str:
        """The weather of a city."""
        return f"{days} days of rain in {city}"

    messages: list[Any] = [HumanMessage("How is the weather?")]
    held = model.bind_tools([weather], tool_choice="weather", strict=True)
    message = held.invoke(messages, seed=1, temperature=0.5, stop=None)
    # Texts without bounds: the demo model may never end one.
    assert message.tool_calls or message.invalid_tool_calls
    for call in message.tool_calls:
        messages += [message, ToolMessage(str(weather.invoke(call["args"])), tool_call_id=call["id"])]
    assert model.invoke(messages, max_tokens=6).content

    embeddings = langchain.OpenAIEmbeddings(
        model="demo", base_url=f"{server.url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    a, b = embeddings.embed_documents(["The sea.", "A ship."])
    assert len(a) == len(b) > 100
