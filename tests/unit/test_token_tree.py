"""The tree of texts and their tokens: only whole pieces are found, memory is bounded, and a reference without a tree
agrees.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tidemill.actors.router.tree import TokenPiece, TokenTree, columns


def given_(text: str, *tokens: int) -> TokenPiece:
    return TokenPiece(text=text, tokens=tokens)


def sampled(text: str, *tokens: int, version: int = 1) -> TokenPiece:
    return TokenPiece(text=text, tokens=tokens, log_probs=(-0.5,) * len(tokens), versions=(version,) * len(tokens))


def found(tree: TokenTree, text: str, scope: str = "") -> tuple[list[str], int]:
    pieces, end = tree.find(text, scope)
    return [piece.text for piece in pieces], end


def test_whole_pieces_are_found_and_nothing_less() -> None:
    tree = TokenTree(1000)
    tree.remember([given_("1+1=", 1, 2, 3, 4), sampled(" two", 5, 6), sampled("<end>", 9)])
    tree.remember([given_("1+1=", 1, 2, 3, 4), sampled(" twelve", 7, 8)])
    assert found(tree, "1+1= two<end> and") == (["1+1=", " two", "<end>"], 13)
    assert found(tree, "1+1= two and") == (["1+1=", " two"], 8)
    assert found(tree, "1+1= twelve") == (["1+1=", " twelve"], 11)
    assert found(tree, "1+1= tw") == (["1+1="], 4), "a part of a piece is another text"
    assert found(tree, "1+1") == ([], 0)
    assert found(tree, "") == ([], 0)
    assert found(tree, "1+1= two", "another scope") == ([], 0)


def test_the_same_text_sampled_again_has_its_newest_ids_with_their_log_probs() -> None:
    tree = TokenTree(1000)
    tree.remember([given_("a", 1), sampled("bc", 2, 3, version=1)])
    tree.remember([given_("a", 1), sampled("bc", 4, version=2)])
    pieces, _ = tree.find("abc")
    assert list(columns(pieces)) == [(1, 0.0, -1, 0), (4, -0.5, 2, 1)]
    assert tree.size == (1 + 1) + (2 + 1)


def test_a_piece_that_begins_elsewhere_is_not_taken_for_one_that_begins_here() -> None:
    tree = TokenTree(1000)
    tree.remember([given_("ab", 1), sampled("cd", 2)])
    tree.remember([given_("a", 3), sampled("bcd", 4)])
    pieces, end = tree.find("abcd")
    assert (end, [token for token, *_ in columns(pieces)]) in ((4, [3, 4]), (1, [3])), (
        "the ids of one way to cut it, never of two"
    )


def test_the_longest_unused_pieces_are_evicted_first_and_never_their_prefixes() -> None:
    tree = TokenTree(42)
    for name in "pqr":
        tree.remember([given_(f"{name}----", 1), sampled(f"{name}++++", 2)])  # 12 each
    found(tree, "p----p++++")
    tree.remember([given_("s----", 1), sampled("s++++", 2)])
    assert tree.size == 42
    assert found(tree, "p----p++++")[1] == 10
    assert found(tree, "q----q++++")[1] == 5, "the response goes before the prompt it stands on"
    assert found(tree, "r----r++++")[1] == found(tree, "s----s++++")[1] == 10


def test_an_emptied_tree_holds_nothing() -> None:
    tree = TokenTree(10)
    for number in range(50):
        tree.remember([given_(f"{number:04}", 1), sampled(f"{number:04}", 2)], scope=f"session {number}")
    assert (tree.size, len(tree)) == (10, 2)
    assert len(tree._roots) == 1, "a scope goes with its last piece"
    tree.remember([given_("far too long for this tree", 1)])
    assert (tree.size, len(tree), tree._roots) == (0, 0, {})


words = st.text("ab", min_size=1, max_size=3)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.lists(words, min_size=1, max_size=4), max_size=12), st.text("ab", max_size=12))
def test_as_a_plain_map_would(texts: list[list[str]], asked: str) -> None:
    """The tree agrees with a map from whole text to the piece that ends there."""
    tree, plain = TokenTree(10_000), dict[str, TokenPiece]()
    for number, parts in enumerate(texts):
        pieces = [TokenPiece(text=part, tokens=(number, place)) for place, part in enumerate(parts)]
        tree.remember(pieces)
        for place, piece in enumerate(pieces):
            plain["".join(parts[: place + 1])] = piece
    expected, end = [], 0
    for at in range(1, len(asked) + 1):
        piece = plain.get(asked[:at])
        if piece is not None and at - len(piece.text) == end:
            expected.append(piece)
            end = at
    assert tree.find(asked) == (expected, end)
    assert len(tree) == len(plain)
    assert tree.size == sum(len(piece.text) + len(piece.tokens) for piece in plain.values())
