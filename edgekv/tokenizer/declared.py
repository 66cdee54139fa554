"""What the JSON files of a checkpoint say about its special tokens."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from edgekv.errors import TokenizerError
from edgekv.files import MAX_FILE_BYTES, read_object
from edgekv.schema import shown


@dataclasses.dataclass(frozen=True)
class Declared:
    """Special tokens by id (generation_config.json, config.json) and by name (tokenizer_config.json).

    None or an empty tuple: not declared. `vocab_size` is the model's, which may exceed the tokenizer's.
    """

    add_bos: bool | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    vocab_size: int = 0

    def resolve(
        self,
        find: Callable[[str], int | None],
        vocab_size: int,
        own_bos: int | None = None,
        own_eos: tuple[int, ...] = (),
    ) -> tuple[int | None, tuple[int, ...]]:
        """The BOS id and the EOS ids of a tokenizer.

        The tokenizer's BOS goes before the config's, because it is what the model saw in training;
        the config's EOS goes before the tokenizer's, because it lists every token that ends an answer.

        Args:
            find: the id of a token's name, or None.
            vocab_size: the tokenizer's.
            own_bos: what the tokenizer file itself says.
            own_eos: likewise.

        Raises:
            TokenizerError: a declared token is in neither the tokenizer nor the model.
        """
        limit = max(vocab_size, self.vocab_size)
        if self.bos_token is not None:
            bos_id: int | None = _named("bos_token", self.bos_token, find)
        else:
            bos_id = self.bos_id if own_bos is None else own_bos
        if self.eos_ids:
            eos_ids = self.eos_ids
        elif self.eos_token is not None:
            eos_ids = (_named("eos_token", self.eos_token, find),)
        else:
            eos_ids = own_eos
        for key, ids in (("bos_token_id", [] if bos_id is None else [bos_id]), ("eos_token_id", eos_ids)):
            for token_id in ids:
                if not 0 <= token_id < limit:
                    raise TokenizerError(
                        f"{key} {token_id} is not among the {limit} tokens of tokenizer and model; "
                        "correct it in generation_config.json or config.json"
                    )
        return bos_id, eos_ids


def read_declared(
    tokenizer_folder: pathlib.Path, model_folder: pathlib.Path, config: Mapping[str, Any] | None
) -> Declared:
    """Reads the JSON files that are there; `config` stands for config.json where given.

    Raises:
        TokenizerError: a file is not a JSON object, or a special token in it is of the wrong type.
    """
    settings = _read_object(tokenizer_folder / "tokenizer_config.json")
    add_bos = settings.get("add_bos_token")
    if not isinstance(add_bos, (bool, type(None))):
        raise TokenizerError(f"add_bos_token is {shown(add_bos)}; tokenizer_config.json may hold true or false")
    names = _read_object(tokenizer_folder / "special_tokens_map.json") | settings
    config = _read_object(model_folder / "config.json") if config is None else config
    ids = {**config, **_read_object(model_folder / "generation_config.json")}
    bos_ids = _ids("bos_token_id", ids)
    vocab_size = config.get("vocab_size")
    return Declared(
        add_bos=add_bos,
        bos_token=_name("bos_token", names),
        eos_token=_name("eos_token", names),
        bos_id=bos_ids[0] if bos_ids else None,
        eos_ids=_ids("eos_token_id", ids),
        vocab_size=vocab_size if isinstance(vocab_size, int) else 0,
    )


def _read_object(path: pathlib.Path) -> dict[str, Any]:
    """The entries of a JSON object that are not null; none if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = read_object(path, MAX_FILE_BYTES)
    except ValueError as error:
        raise TokenizerError(f"{path} {error}; copy it again, or remove it") from None
    return {key: entry for key, entry in value.items() if entry is not None}


def _ids(key: str, values: Mapping[str, Any]) -> tuple[int, ...]:
    value = values.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise TokenizerError(f"{key} is {shown(value)}; a token id or a list of them is accepted in its file")
    return tuple(ids)


def _name(key: str, values: Mapping[str, Any]) -> str | None:
    value = values.get(key)
    name = value.get("content") if isinstance(value, dict) else value
    if name is not None and not isinstance(name, str):
        raise TokenizerError(
            f"{key} is {shown(value)}; tokenizer_config.json and special_tokens_map.json may hold a text, "
            'or {"content": text}'
        )
    return name


def _named(key: str, name: str, find: Callable[[str], int | None]) -> int:
    token_id = find(name)
    if token_id is None:
        raise TokenizerError(
            f"{key} {name!r} is not in the tokenizer's vocabulary; "
            "correct it in tokenizer_config.json or special_tokens_map.json"
        )
    return token_id
