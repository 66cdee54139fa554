"""JSON schemas: the text follows the schema whatever the model would say, with every kind of tokenizer."""

import json
import pathlib
import sys

import pytest
from helpers import Cli, raises, text_of

from edgekv import Constraint, Session
from edgekv.engine.grammar import JsonSchema
from edgekv.errors import ConfigError, EdgeKVError

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["old", "young", "é"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(3))
def test_the_text_is_of_the_schema(demo: Session, seed: int) -> None:
    demo.reset()
    how = {"max_new_tokens": 150, "temperature": 1.2, "seed": seed, "json_schema": SCHEMA}
    steps = list(demo.generate("The old man: ", **how))
    value = json.loads(text_of(steps))
    assert list(value) == ["name", "age", "tags"]
    assert len(value["name"]) <= 12
    assert 0 <= value["age"] <= 120
    assert set(value["tags"]) <= {"old", "young", "é"}
    assert steps[-1].finish_message == "end of schema"


def test_schemas_that_can_not_be_followed(demo: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = demo.require_tokenizer()
    constraint: Constraint = JsonSchema(SCHEMA, tokenizer, demo.config.vocab_size)
    with raises(ConfigError, field="json_schema"):
        demo.generate("The old man: ", json_schema={}, constraint=constraint, temperature=0.0)
    for schema in ({"type": "nonsense"}, {"$ref": "#/nowhere"}, {"type": "object", "properties": 3}):
        with raises(ConfigError, match="can't be followed"):
            JsonSchema(schema, tokenizer, demo.config.vocab_size)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(EdgeKVError, match=r"pip install 'edgekv\[grammar\]'"):
        JsonSchema({}, tokenizer, 10)


def test_on_the_command_line(tmp_path: pathlib.Path, cli: Cli) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    run = ["run", "--prompt", "Who is it?", "--temperature", "1", "--seed", "2", "--ctx", "300", "--json-schema"]
    assert set(json.loads(cli(*run, path).out)) == {"name", "age", "tags"}
    path.write_text("[1]")
    cli(*run, path, status=2)
