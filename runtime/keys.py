"""API keys, of which only digests are kept (read once at start, compared per request)."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import tomllib
from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostinato.engines.errors import RecipeError

from .call import Caller

ENVIRONMENT = "OSTINATO_API_KEYS"
MIN_KEY_CHARS = 16
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_KEY = re.compile(r"[\x21-\x7e]+")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_OPTIONS = {"requests_per_minute", "max_concurrent"}
_ALL = {"name", "key", "sha256", "tenant"} | _OPTIONS


@dataclass(frozen=True)
class Key:
    """A key by its SHA-256. `tenant`: whose prefixes it shares. None: what the limits say for every key."""

    name: str
    digest: bytes
    tenant: str
    requests_per_minute: int | None = None
    max_concurrent: int | None = None


class Keys:
    """All keys. Raises RecipeError where two have one name, or are the same."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys = tuple(keys)
        self._secret = secrets.token_bytes(32)  # of this process: a salt can't be computed elsewhere
        for what, values in (("name", [k.name for k in self._keys]), ("key", [k.digest for k in self._keys])):
            if len(set(values)) < len(values):
                raise RecipeError(f"two API keys have the same {what}: give each its own")

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, authorization: str) -> Key | None:
        """Whose header this is. Every key is compared, and in constant time, so that time tells nothing."""
        scheme, _, given = authorization.partition(" ")
        digest = hashlib.sha256(given.strip().encode("utf-8", "surrogatepass")).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found if scheme.lower() == "bearer" else None

    def caller(self, key: Key) -> Caller:
        """The salt has one length for all, so that what a caller adds to it can't make it another tenant's."""
        salt = hmac.new(self._secret, key.tenant.encode(), hashlib.sha256).hexdigest()
        return Caller(key.tenant, salt)


def read_keys(path: Path | None, environment: MutableMapping[str, str]) -> Keys:
    """Keys of a file and of the environment, where they are removed. Raises RecipeError, which repeats no key."""
    keys: list[Key] = []
    if path is not None:
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise RecipeError(f"no API keys at {path} ({reason}): give a file with lines name:key") from None
        keys.extend(_tables(text, path) if path.suffix == ".toml" else _lines(text, str(path)))
        if not keys:
            raise RecipeError(f"{path} has no API key: give lines name:key, or drop --api-keys")
    keys.extend(_lines(environment.pop(ENVIRONMENT, "").replace(",", "\n"), ENVIRONMENT))
    return Keys(keys)


def _lines(text: str, where: str) -> Iterator[Key]:
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, sign, key = line.partition(":")
        if not sign:
            raise RecipeError(f"{where}, entry {number}, has no colon: write name:key")
        yield _key({"name": name.strip(), "key": key.strip()}, f"{where}, entry {number}")


def _tables(text: str, path: Path) -> Iterator[Key]:
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError:  # whose message may repeat a line
        raise RecipeError(f"{path} is not TOML: correct it") from None
    entries = table.get("keys")
    if set(table) != {"keys"} or not isinstance(entries, list):
        raise RecipeError(f"{path} has other things than [[keys]]: give name and key, or sha256, in each")
    for number, entry in enumerate(entries, 1):
        where = f"{path}, key {number}"
        if not isinstance(entry, dict):
            raise RecipeError(f"{where}, is no table: write [[keys]], and name and key, or sha256, below it")
        if unknown := sorted(set(entry) - _ALL):
            raise RecipeError(f"{where}, has {', '.join(unknown)}: the known ones are {', '.join(sorted(_ALL))}")
        yield _key(entry, where)


def _key(entry: dict[str, Any], where: str) -> Key:
    name, tenant = entry.get("name"), entry.get("tenant", entry.get("name"))
    for what, value in (("name", name), ("tenant", tenant)):
        if not (isinstance(value, str) and _NAME.fullmatch(value)):
            raise RecipeError(f"{where}, has no good {what}: give 1 to 64 of A-Z a-z 0-9 _ . -")
    for option in _OPTIONS & set(entry):
        if type(entry[option]) is not int or entry[option] < 1:
            raise RecipeError(f"{where}: {option} is {entry[option]!r}: give 1 or more")
    options = {option: entry[option] for option in _OPTIONS & set(entry)}
    return Key(str(name), _digest(entry, where), str(tenant), **options)


def _digest(entry: dict[str, Any], where: str) -> bytes:
    key, sha256 = entry.get("key"), entry.get("sha256")
    if (key is None) == (sha256 is None):
        raise RecipeError(f"{where}, needs either key or sha256")
    if sha256 is not None:
        if not (isinstance(sha256, str) and _SHA256.fullmatch(sha256)):
            raise RecipeError(f"{where}: sha256 is not 64 digits of hexadecimal in small letters: correct it")
        return bytes.fromhex(sha256)
    if not (isinstance(key, str) and len(key) >= MIN_KEY_CHARS and _KEY.fullmatch(key)):
        raise RecipeError(
            f"{where}, has a key that can be guessed or sent badly: give {MIN_KEY_CHARS} or more printable ASCII "
            "characters without spaces, such as `openssl rand -hex 32` prints"
        )
    return hashlib.sha256(key.encode()).digest()
