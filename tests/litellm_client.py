"""A program that uses litellm: completion, stream, tool call, embedding. test_server_clients runs it.

usage: python tests/litellm_client.py URL
"""

import json
import sys

import litellm


def main(url: str) -> None:
    messages = [{"role": "user", "content": "Tell me of the sea."}]
    given = {"model": "openai/demo", "api_base": f"{url}/v1", "api_key": "none"}
    whole = litellm.completion(messages=messages, max_tokens=8, temperature=0, **given)
    assert whole.choices[0].message.content
    assert whole.usage.completion_tokens == 8
    stream = litellm.completion(messages=messages, max_tokens=8, temperature=0, stream=True, **given)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.choices[0].message.content
    zones = {"zone": {"type": "string", "enum": ["UTC", "CET"]}}
    schema = {"type": "object", "properties": zones, "required": ["zone"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "clock", "parameters": schema}}]
    choice = {"type": "function", "function": {"name": "clock"}}
    called = litellm.completion(messages=messages, tools=tools, tool_choice=choice, **given)
    (call,) = called.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["zone"] in ("UTC", "CET")
    vectors = litellm.embedding(input=["The sea."], **given, encoding_format="float")
    assert len(vectors.data[0]["embedding"]) > 100
    print("litellm is content")


if __name__ == "__main__":
    main(sys.argv[1])
