"""Images of messages: data URLs to bytes, bytes to embeddings, which are kept for the conversation's next turn."""

from __future__ import annotations

import base64
import binascii
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence

from edgekv.server.protocol import RequestError
from edgekv.session.session import Session
from edgekv.vision.images import picture_of
from edgekv.vision.prompt import Embeddings, Prompt, check_places, place_images, require_places

KEPT_BYTES = 64 << 20  # of embeddings


def decoded(url: str, name: str) -> bytes:
    """The bytes of a data URL. Raises RequestError: anything else is not fetched."""
    head, _, data = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        accepted = "data:image/png;base64,... (nothing is fetched from elsewhere)"
        raise RequestError(400, f"{name} is {url[:40]!r}; accepted: {accepted}", param=name)
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(400, f"{name} is no base64 ({error}): encode the file again", param=name) from None


class Images:
    """The images of all conversations as the model sees them, the latest ones kept; for any thread."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._seen: OrderedDict[bytes, Embeddings] = OrderedDict()
        self._lock = threading.Lock()

    def placed(self, ids: Sequence[int], files: Sequence[bytes]) -> Prompt:
        """The prompt with the images at its image tokens. ImageError: no image, or a model that sees none."""
        token = self._session.model.image_token
        if not files:
            if token is not None:
                check_places(ids, token, 0)
            return ids
        vision = self._session.prompt_encoder.vision  # says what is missing
        require_places(ids, vision.image_token, len(files))
        return place_images(ids, vision.image_token, [self._embedded(file) for file in files], 0)

    def _embedded(self, file: bytes) -> Embeddings:
        key = hashlib.sha256(file).digest()
        found = self._seen.get(key)
        if found is None:
            picture = picture_of(file, "the image")
            with self._session.computing():
                found = self._session.prompt_encoder.vision(picture)
        with self._lock:
            self._seen[key] = found
            self._seen.move_to_end(key)
            while sum(each.rows.nbytes for each in self._seen.values()) > KEPT_BYTES and len(self._seen) > 1:
                self._seen.popitem(last=False)
        return found
