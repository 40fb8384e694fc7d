"""The KV manager: which blocks of the pool each request holds, and which full blocks can be shared (runs per step).

A request's tokens, in whole blocks:   [0, num_cached) shared, only read   [num_cached, ...) its own, written once.
A block is held (by one row or more), cached (free to take, but its content can still be shared) or blank.
"""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ostinato.engines.sizes import Limits

from .request import Request

NULL_BLOCK = 0  # padding reads and writes go there; never handed out
ROOT_NODE = 0  # the parent of a first block

BlockHash = Callable[[int, tuple[int, ...], str], int]

_START = secrets.randbits(64)


def block_hash(parent: int, token_ids: tuple[int, ...], salt: str) -> int:
    """Hash of a full block; its start differs per process, so that nobody can prepare collisions."""
    return hash((_START, parent, salt, token_ids))


class BlockKey:
    """What a full block holds: a parent node, its own tokens and a salt. Equality compares them, never the hash."""

    __slots__ = ("_hash", "parent", "salt", "token_ids")

    def __init__(self, parent: int, token_ids: tuple[int, ...], salt: str, hashed: int) -> None:
        self.parent = parent
        self.token_ids = token_ids
        self.salt = salt
        self._hash = hashed

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, BlockKey)
            and self.parent == other.parent
            and self.token_ids == other.token_ids
            and self.salt == other.salt
        )


@dataclass(slots=True)
class _Holding:
    """A request that holds blocks; the first `num_registered` are known to the map, the last of them as `node`."""

    request: Request
    num_registered: int
    node: int


class Pages:
    """Blocks of one pool. All verbs are exact: they succeed whole or change nothing.

    A registered block gets a node number that is never used again, so a chain of (parent node, tokens, salt) names
    the whole prefix, and a block that was evicted and refilled can't stand for its old content.
    """

    def __init__(self, limits: Limits, prefix_caching: bool = True, hash_of: BlockHash = block_hash) -> None:
        self.prefix_caching = prefix_caching
        self.num_evictions = 0
        self._block_size = limits.block_size
        self._hash_of = hash_of
        self._num_holders = [0] * limits.num_blocks
        self._blank = list(range(limits.num_blocks - 1, NULL_BLOCK, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._blocks: dict[BlockKey, int] = {}
        self._keys: dict[int, BlockKey] = {}
        self._nodes: dict[int, int] = {}
        self._last_node = ROOT_NODE
        self._holdings: dict[int, _Holding] = {}

    @property
    def num_total(self) -> int:
        """Blocks that can be handed out."""
        return len(self._num_holders) - 1

    @property
    def num_free(self) -> int:
        """Blocks that no request holds."""
        return len(self._blank) + len(self._cached)

    def books(self) -> tuple[list[int], list[int]]:
        """Copies for who looks from outside: the holders of each block, and the cached blocks."""
        return self._num_holders.copy(), list(self._cached)

    def admit(self, request: Request, headroom: int = 0) -> bool:
        """Give a request blocks for all its tokens, shared ones first; False if `headroom` would not stay free.

        Sets `blocks` and `num_computed`. At least one token is left to compute. A request with prompt tokens to score
        shares nothing, because each of their logits is needed.
        """
        assert request.id not in self._holdings, f"request {request.id} already holds blocks"
        shared, node = self._match(request) if self.prefix_caching and request.is_scored else ([], ROOT_NODE)
        num_new = -(-len(request.tokens) // self._block_size) - len(shared)
        num_revived = sum(not self._num_holders[block] for block in shared)
        if num_new + num_revived + headroom > self.num_free:
            return False
        for block in shared:
            self._cached.pop(block, None)
            self._num_holders[block] += 1
        request.blocks = [*shared, *(self._take() for _ in range(num_new))]
        request.num_computed = len(shared) * self._block_size
        self._holdings[request.id] = _Holding(request, len(shared), node)
        return True

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make room for the request's first `num_tokens` tokens; False if there are too few free blocks."""
        num_missing = -(-num_tokens // self._block_size) - len(request.blocks)
        if num_missing <= 0:
            return True
        if num_missing > self.num_free:
            return False
        request.blocks.extend(self._take() for _ in range(num_missing))
        return True

    def register(self, request: Request) -> None:
        """Make the request's full computed blocks known for sharing. Call it after `num_computed` moved on."""
        size = self._block_size
        holding = self._holdings[request.id]
        if not self.prefix_caching or (holding.num_registered + 1) * size > request.num_computed:
            return
        for index in range(holding.num_registered, request.num_computed // size):
            key = self._key(holding.node, request, index)
            block = self._blocks.get(key)
            if block is None:
                block = request.blocks[index]
                self._last_node += 1
                self._blocks[key] = block
                self._keys[block] = key
                self._nodes[block] = self._last_node
            elif block in self._cached:
                self._cached.move_to_end(block)
            holding.node = self._nodes[block]
            holding.num_registered = index + 1

    def forget(self, request: Request) -> None:
        """Share the request's blocks with nobody from now on: what they hold may be no numbers."""
        for block in request.blocks:
            if (key := self._keys.pop(block, None)) is not None:
                del self._blocks[key]
                del self._nodes[block]

    def release(self, request: Request) -> None:
        """Take all blocks back; the request starts again from nothing computed."""
        del self._holdings[request.id]
        for block in reversed(request.blocks):  # a chain is evicted from its end
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0:
                if block in self._keys:
                    self._cached[block] = None
                else:
                    self._blank.append(block)
        request.blocks = []
        request.num_computed = 0

    def check_integrity(self) -> None:
        """Compare all books with each other; AssertionError names the breach."""
        held = Counter(block for holding in self._holdings.values() for block in holding.request.blocks)
        for block, count in enumerate(self._num_holders):
            assert count == held[block], f"block {block} has {count} holders on the books, {held[block]} in requests"
        free = [*self._blank, *self._cached]
        assert len(free) == len(set(free)), "a block is twice in the free lists"
        assert held[NULL_BLOCK] == 0, "the null block is held"
        assert NULL_BLOCK not in free, "the null block is free to take"
        assert NULL_BLOCK not in self._keys, "the null block is shared"
        assert not held.keys() & set(free), "a held block is free to take"
        assert len(held) + len(free) == self.num_total, f"{self.num_total - len(held) - len(free)} blocks are lost"
        assert not self._keys.keys() & set(self._blank), "a blank block is in the map"
        assert self._cached.keys() <= self._keys.keys(), "a cached block is not in the map"
        assert len(self._keys) == len(self._blocks) == len(self._nodes), "the maps differ in size"
        assert all(self._blocks[key] == block for block, key in self._keys.items()), "the maps disagree about a block"
        assert len(set(self._nodes.values())) == len(self._nodes), "two blocks are one node"
        for holding in self._holdings.values():
            self._check_holding(holding)

    def _check_holding(self, holding: _Holding) -> None:
        request = holding.request
        assert len(set(request.blocks)) == len(request.blocks), f"request {request.id} holds a block twice"
        room = len(request.blocks) * self._block_size
        assert request.num_computed <= room, f"request {request.id} has tokens outside its blocks"
        num_full = request.num_computed // self._block_size
        assert holding.num_registered <= num_full, f"request {request.id} registered a block that is not full"
        own = request.blocks[num_full:]
        assert all(self._num_holders[block] == 1 for block in own), f"request {request.id} would write a shared block"
        assert not self._keys.keys() & set(own), f"request {request.id} would write a block that is in the map"

    def _match(self, request: Request) -> tuple[list[int], int]:
        """The longest known prefix: its blocks and its node; at most all tokens but one."""
        blocks: list[int] = []
        node = ROOT_NODE
        for index in range((len(request.tokens) - 1) // self._block_size):
            block = self._blocks.get(self._key(node, request, index))
            if block is None:
                break
            blocks.append(block)
            node = self._nodes[block]
        return blocks, node

    def _key(self, parent: int, request: Request, index: int) -> BlockKey:
        start = index * self._block_size
        token_ids = tuple(request.tokens[start : start + self._block_size])
        return BlockKey(parent, token_ids, request.salt, self._hash_of(parent, token_ids, request.salt))

    def _take(self) -> int:
        """A free block, blank if there is one, else the least recently used cached one, forgotten first."""
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._blocks[self._keys.pop(block)]
            del self._nodes[block]
            self.num_evictions += 1
        self._num_holders[block] = 1
        return block
