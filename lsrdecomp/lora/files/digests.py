"""Digests of what a file says, kept in the header of that file or at its end.

SHA256SUMS beside the files vouches for every byte, and is lost where only they are copied. So a
header holds a short digest of its tensors, and one of the config that the file belongs to: 48 bits
each, against accidents and not against forgers. In LSR directories, where a header would outweigh
them, they are the last bytes of the file, the seal.

Changes that no program acts on change no digest: the order and the spaces of JSON, and the
descriptions that image programs write into headers (`DESCRIPTIONS`).
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

HEADER_KEY = "lsr"
"""Where the two digests stand in the metadata of a header, one after the other."""
DIGEST_BYTES = 6
DIGEST_CHARACTERS = 8  # of base64
SEAL_BYTES = 2 * DIGEST_BYTES
"""Bytes of both digests where they are the last bytes of a file, and not in its header."""
DESCRIPTIONS = ("ss_", "sshs_", "ssmd_", "modelspec.")
"""Beginnings of metadata that image programs and model managers edit."""


@dataclass(frozen=True, slots=True)
class ContentDigests:
    """The two digests in a header.

    Attributes
    ----------
    tensors : str
        Of names, types, shapes and numbers of all tensors, and of the metadata beside them.
    config : str
        Of the config that the file belongs to; empty for a file of its own.

    Examples
    --------
    >>> digests = ContentDigests.of({"q": ("float32", (2, 2))}, {}, "0" * 64, {"r": 8})
    >>> ContentDigests.read({"lsr": digests.text}) == digests
    True
    >>> ContentDigests.of({"q": ("float32", (4,))}, {}, "0" * 64, {"r": 8}).config == digests.config
    True
    """

    tensors: str
    config: str = ""

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
        metadata: Mapping[str, str],
        data_sha256: str,
        config: Mapping[str, Any] | None = None,
    ) -> ContentDigests:
        """Return the digests of a file's content.

        Parameters
        ----------
        tensors : mapping of str to (dtype, shape)
        metadata : mapping of str to str
            Of the header; descriptions and the digests themselves are left out.
        data_sha256 : str
            SHA-256 of what follows the header.
        config : mapping, optional
            JSON values.
        """
        entries = [[name, dtype, list(shape)] for name, (dtype, shape) in sorted(tensors.items())]
        content = [entries, _acting(metadata), data_sha256]
        return cls(_digest(content), "" if config is None else config_digest(config))

    @classmethod
    def read(cls, metadata: Mapping[str, str]) -> ContentDigests | None:
        """Return the digests that a header holds, or None."""
        text = metadata.get(HEADER_KEY)
        if text is None:
            return None
        return cls(text[:DIGEST_CHARACTERS], text[DIGEST_CHARACTERS:])

    @classmethod
    def of_seal(cls, seal: bytes) -> ContentDigests:
        """Return the digests that the last bytes of a file hold."""
        text = base64.b64encode(seal, b"-_").decode()
        return cls(text[:DIGEST_CHARACTERS], text[DIGEST_CHARACTERS:])

    @property
    def seal(self) -> bytes:
        """Both in bytes, as they end a file; see `SEAL_BYTES`."""
        return base64.b64decode(self.text, b"-_")

    @property
    def text(self) -> str:
        """Both, as a header holds them."""
        return self.tensors + self.config


def config_digest(config: Mapping[str, Any]) -> str:
    """Return the digest of a config's values, whatever their order."""
    return _digest(config)


def field_digests(config: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of each field of a config, for a record that names what changed."""
    return {name: _digest(value) for name, value in sorted(config.items())}


def changed_fields(config: Mapping[str, Any], recorded: Mapping[str, Any]) -> Iterable[str]:
    """Yield the fields of a config that are not as recorded, or gone, or new."""
    current = field_digests(config)
    for name in sorted(current.keys() | recorded.keys()):
        if current.get(name) != recorded.get(name):
            yield name


def _acting(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata that readers act on, as far as anybody can know."""
    return {
        name: text
        for name, text in metadata.items()
        if name != HEADER_KEY and not name.startswith(DESCRIPTIONS)
    }


def _digest(value: Any) -> str:
    """Return a short digest of JSON values."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).digest()[:DIGEST_BYTES]
    return base64.b64encode(digest, b"-_").decode()
