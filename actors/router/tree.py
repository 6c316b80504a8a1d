"""Map from text to the token ids that engines received and sampled for it. Pure: knows no tokenizer, no HTTP.

A radix tree over characters. A node that ends a *piece* (a prompt, a response, the ending of a response) has the
piece's tokens; only whole pieces are found again: text that leaves a piece in its middle is another text, and is
tokenised as such.

    "1+1=" -> [16, 10, 16, 28]  --+-- " 2" -> [220, 17] ---- "<|im_end|>" -> [151645]
                                  +-- " two" -> [1378]
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tidemill.bus.wire.json_object import JsonMapping


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPiece:
    """A stretch of text and its tokens."""

    text: str
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...] = ()
    """Log-probs of sampled tokens; empty for tokens of a prompt."""
    versions: tuple[int, ...] = ()
    """Version of the weights that generated each; empty for tokens that were given."""

    def __post_init__(self) -> None:
        if self.log_probs and not len(self.log_probs) == len(self.versions) == len(self.tokens):
            raise ValueError(
                f"piece: want equal lengths, got {len(self.tokens)}, {len(self.log_probs)}, {len(self.versions)}"
            )

    @property
    def sampled(self) -> bool:
        """True when an engine sampled the tokens; False when they were given in a prompt."""
        return bool(self.log_probs)


class _Node:
    __slots__ = ("children", "edge", "parent", "piece")

    def __init__(self, edge: str, parent: "_Node | None") -> None:
        self.edge, self.parent = edge, parent
        """Characters between the parent and this node."""
        self.children: dict[str, _Node] = {}
        """Children by the first character of their edges."""
        self.piece: TokenPiece | None = None
        """The piece that ends here; it begins where the one before it on the way from the root ends."""


class TokenTree:
    """Holds at most ``max_text`` characters and tokens in all; the pieces unused for longest are evicted first."""

    def __init__(self, max_text: int) -> None:
        self._max_text = max_text
        self._roots: dict[str, _Node] = {}
        """Roots by scope."""
        self._ends: OrderedDict[_Node, str] = OrderedDict()
        """Nodes that end a piece -> their scope, longest unused first; a used node stands before its ancestors."""
        self.size = 0
        """Number of characters plus number of tokens of all pieces."""

    def __len__(self) -> int:
        return len(self._ends)

    def remember(self, pieces: Sequence[TokenPiece], scope: str = "") -> None:
        """Remember a text from its beginning, in its ``scope``. Known pieces are replaced: their ids are older."""
        shown = [piece for piece in pieces if piece.text]  # ids without text cannot be found again by themselves
        if not shown:
            return
        node, touched = self._roots.setdefault(scope, _Node("", None)), []
        for piece in shown:
            node = self._descend(node, piece.text)
            self.size += _cost(piece) - (_cost(node.piece) if node.piece is not None else 0)
            node.piece = piece
            self._ends[node] = scope
            touched.append(node)
        self._touch(touched)
        self._shrink()

    def find(self, text: str, scope: str = "") -> tuple[list[TokenPiece], int]:
        """Return the longest beginning of ``text`` that is known as whole pieces, and its number of characters."""
        node, at, best, path = self._roots.get(scope), 0, 0, list[_Node]()
        while node is not None and at < len(text):
            node = node.children.get(text[at])
            if node is None or not text.startswith(node.edge, at):
                break
            at += len(node.edge)
            if node.piece is not None and at - len(node.piece.text) == best:
                path.append(node)
                best = at
        self._touch(path)
        return [node.piece for node in path if node.piece is not None], best

    def _descend(self, node: _Node, text: str) -> _Node:
        """Return the node at the end of ``text`` below ``node``; edges are split where needed."""
        while text:
            child = node.children.get(text[0])
            if child is None:
                child = node.children[text[0]] = _Node(text, node)
                return child
            common = _common(child.edge, text)
            if common < len(child.edge):
                child = self._split(child, common)
            node, text = child, text[common:]
        return node

    def _split(self, child: _Node, at: int) -> _Node:
        parent = child.parent
        assert parent is not None, "a root has no edge"
        middle = _Node(child.edge[:at], parent)
        parent.children[child.edge[0]] = middle
        child.edge, child.parent = child.edge[at:], middle
        middle.children[child.edge[0]] = child
        return middle

    def _touch(self, path: Sequence[_Node]) -> None:
        for node in reversed(path):  # deeper nodes count as older: they are evicted before their ancestors
            self._ends.move_to_end(node)

    def _shrink(self) -> None:
        while self.size > self._max_text and self._ends:
            node, scope = self._ends.popitem(last=False)
            assert node.piece is not None, "only ends are listed"
            self.size -= _cost(node.piece)
            node.piece = None
            self._prune(node, scope)

    def _prune(self, node: _Node, scope: str) -> None:
        """Remove nodes without piece and children, and merge a node without piece into its only child."""
        while node.parent is not None and node.piece is None and not node.children:
            del node.parent.children[node.edge[0]]
            node = node.parent
        if node.parent is None:
            if not node.children:
                self._roots.pop(scope, None)
        elif node.piece is None and len(node.children) == 1:
            (child,) = node.children.values()
            child.edge, child.parent = node.edge + child.edge, node.parent
            node.parent.children[child.edge[0]] = child


def _cost(piece: TokenPiece) -> int:
    return len(piece.text) + len(piece.tokens)


def _common(first: str, second: str) -> int:
    if second.startswith(first):
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


def ids_of(pieces: Sequence[TokenPiece]) -> list[int]:
    """Return the token ids of pieces, one after the other."""
    return [token for piece in pieces for token in piece.tokens]


def columns(pieces: Sequence[TokenPiece]) -> Iterator[tuple[int, float, int, int]]:
    """Yield (token id, log-prob, version, 1) of every sampled token, (token id, 0.0, -1, 0) of every given one."""
    for piece in pieces:
        unsampled = ((token, 0.0, -1, 0) for token in piece.tokens)
        sampled = ((*values, 1) for values in zip(piece.tokens, piece.log_probs, piece.versions, strict=False))
        yield from sampled if piece.sampled else unsampled


def sampled_piece(answer: JsonMapping) -> TokenPiece | None:
    """Return the tokens of a state, without text; None when it has no ids, or not the log-prob of each."""
    ids, meta = tuple(answer.get("output_ids") or ()), answer["meta_info"]
    log_probs = tuple(entry[0] for entry in meta.get("output_token_logprobs") or ())
    if not ids or len(log_probs) != len(ids) or None in log_probs:
        return None
    return TokenPiece(text="", tokens=ids, log_probs=log_probs, versions=tuple(_versions(meta, len(ids))))


def _versions(meta: JsonMapping, num_tokens: int) -> list[int]:
    """Return the version of each token; -1 where it is not reported as a number."""
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version"), "start": 0, "end": num_tokens}]
    versions = [-1] * num_tokens
    for span in spans:
        number = int(span["version"]) if str(span["version"]).isdecimal() else -1
        versions[span["start"] : span["end"]] = [number] * (span["end"] - span["start"])
    return versions[:num_tokens]
