r"""Rewards of mathematics on a table of LaTeX forms: labels by forms of the answer, against math-verify and against the
truth.

A form is the content of ``\boxed{}`` with the label in it. Each is right or wrong for every label of its kind. Where a
reward or the library decides otherwise, ``MEANT`` has the form with the reason; docs/rewards.md has the list in words.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest

from tidemill.bus.wire.messages import Status
from tidemill.rewards.builtin.math_answer import math_answer, to_number
from tidemill.rewards.builtin.math_equality import math_verify
from tidemill.rewards.builtin.math_rewards import dapo, deepscaler, gsm8k, math
from tidemill.rewards.port import RewardRequest

WHOLE = ("18", "7", "9", "4", "-3", "120")
LARGE = ("1234", "10236", "1000000", "-4321")
PARTS = ("0.5", "48.5", "-1.75")
GROUPS = {
    "comma": ",",
    "braces": "{,}",
    "thin": r"\,",
    "comma and back": r",\!",
    "back": r"\!",
    "thin in braces": r"{\,}",
    "tie": "~",
    "blank": " ",
}
RIGHT = {
    "itself": "{}",
    "blanks": "  {}  ",
    "stop": "{}.",
    "braces": "{{{}}}",
    "brackets": "({})",
    "dollar": r"\${}",
    "text": r"\text{{{}}}",
    "bold": r"\mathbf{{{}}}",
    "roman": r"\mathrm{{{}}}",
    "assigned": "x = {}",
    "assigned y": "y={}",
    "unit in text": r"{}\text{{ eggs}}",
    "thin unit": r"{}\,\text{{cm}}",
    "square unit": r"{}\text{{ cm}}^2",
    "unit": "{} eggs",
    "units": "{} feet per second",
    "degrees": r"{}^\circ",
    "roman unit": r"{} \mathrm{{m}}",
    "unit with stop": r"{} \text{{ dollars.}}",
    "sized": r"\displaystyle {}",
    "sized brackets": r"\left({}\right)",
}
WRONG = {
    "sum": "x+{}",
    "sum behind": "{}+x",
    "next": "{}+1",
    "product": "{}x",
    "product with blank": "{} x",
    "power": "x^{{{}}}",
    "square": "({})^2",
    "tower": "9^{{9^{{9^{{{}}}}}}}",
    "root": r"\sqrt{{9 \cdot ({})^2}}",
    "factorial": "({}+1)!",
    "words before": r"\text{{none of the }} {}",
    "not": r"\text{{not }} {}",
    "two": "{0}, {0}+1",
    "pair": "({0}, {0})",
    "interval": "[{0}, {0}+1]",
    "or": r"{} \text{{ or }} 5001",
    "less": "x < {}",
    "times pi": r"{}\pi",
    "imaginary": "{}i",
    "digit behind": "{}1",
    "digits before": "77{}",
    "fraction": r"\frac{{{}}}{{3}}",
    "over x": r"\frac{{{}}}{{x}}",
    "millions": r"{} \text{{ million}}",
    "million": "{} million",
    "index": "a_{{{}}}",
    "function": "f({})",
    "sine": r"\sin({})",
    "word": "seven",
    "empty": "",
    "set with another": r"\{{{}, 5001\}}",
    "equation": "{} = x + 1",
}
EVALUATED = {
    "fraction of one": r"\frac{{{}}}{{1}}",
    "slash one": "{}/1",
    "plus nothing": "{}+0",
    "times one": r"{} \times 1",
    "root of square": r"-(-({}))",
}
EXPRESSIONS = [
    (
        r"\frac{1}{2}",
        [r"\frac12", r"\dfrac{1}{2}", "0.5", "1/2", r"\frac{2}{4}", ".5"],
        ["0.51", "2", r"\frac{1}{2}x", "1, 2", r"x+\frac{1}{2}"],
    ),
    (r"-\frac{3}{4}", [r"\frac{-3}{4}", "-3/4", "-0.75", r"-\dfrac{3}{4}"], [r"\frac{3}{4}", "-34", "-3", "-4"]),
    (r"2\sqrt{3}", [r"\sqrt{12}", r"\sqrt{3}\cdot 2", r"2 \sqrt 3"], [r"\sqrt{6}", "2", "3", r"2+\sqrt{3}"]),
    (r"\sqrt{4}", ["2", r"\sqrt 4"], ["4", r"\sqrt{5}", "-2"]),
    ("(1,2)", ["(1, 2)", r"\left(1,2\right)", "(1.0, 2)"], ["(2,1)", "1", "2", "(1,2,3)", "[1,2]"]),
    ("x^2+2x+1", ["(x+1)^2", "1+2x+x^2", "x^2 + 2x + 1"], ["x^2", "x+1", "(x-1)^2", "4"]),
    (r"3\pi", [r"\pi \cdot 3", r"3 \pi"], ["3", r"\pi", r"3+\pi", "9.42"]),
    (r"\text{Paris}", ["Paris", r"\text{paris}", r"\mathrm{Paris}"], ["London", r"\text{Paris or Rome}", "P"]),
]


@dataclass(frozen=True)
class Form:
    """An answer in a box."""

    name: str
    label: str
    text: str
    right: bool


def grouped(label: str, separator: str) -> str:
    return f"{int(label):,}".replace(",", separator)


def forms() -> list[Form]:
    """Return the table."""
    found = []
    for label in (*WHOLE, *LARGE, *PARTS):
        for right, table in ((True, RIGHT | EVALUATED), (False, WRONG)):
            found += [Form(name, label, text.format(label), right) for name, text in table.items()]
    for name, separator in GROUPS.items():
        for label in LARGE:
            texts = [grouped(label, separator), grouped(label, separator) + ".00", rf"\${grouped(label, separator)}"]
            found += [Form(f"groups by {name}", label, text, True) for text in texts]
            found.append(Form(f"label by {name}", grouped(label, separator), label, True))
            found.append(
                Form(f"groups by {name}, one more", label, grouped(label, separator) + separator + "000", False)
            )
    for label, rights, wrongs in EXPRESSIONS:
        found += [Form(f"{text} for {label}", label, text, text in rights) for text in [*rights, *wrongs]]
    return found


REWARDS: Mapping[str, Callable[[RewardRequest], Any]] = {
    "math": math,
    "deepscaler": lambda request: deepscaler(request, think=False),
    "dapo": lambda request: dapo(request)["correct"],
    "math_answer": lambda request: math_answer(request)["correct"],
    "gsm8k": gsm8k,
    "math_verify": lambda request: math_verify(request, boxed=True),
}


def score(name: str, form: Form) -> float:
    beginning = "Answer: " if name == "dapo" else "so it is "
    asked = RewardRequest(
        prompt="", response=rf"{beginning}\boxed{{{form.text}}}", label=form.label, status=Status.COMPLETED
    )
    return float(REWARDS[name](asked))


NOT_EVALUATED = "it compares numbers, and computes nothing"
TEXT_ALONE = "a label that is no number is compared as text"
BARE_WORDS = "words that are no known unit stay, as in the code that it is named after"
NUMBERS = dict.fromkeys(["plus nothing", "times one", "root of square"], NOT_EVALUATED) | {
    "fraction of one": "a fraction of whole numbers is one, of decimals it is computed"
}
TEXTS = [
    r"\sqrt{12} for 2\sqrt{3}",
    r"\sqrt{3}\cdot 2 for 2\sqrt{3}",
    r"2 \sqrt 3 for 2\sqrt{3}",
    r"2 for \sqrt{4}",
    r"\sqrt 4 for \sqrt{4}",
    "(1.0, 2) for (1,2)",
    "(x+1)^2 for x^2+2x+1",
    "1+2x+x^2 for x^2+2x+1",
    r"\pi \cdot 3 for 3\pi",
]
OF_PEERS = dict.fromkeys(["unit", "units"], BARE_WORDS)
SEPARATORS = ("thin", "thin in braces", "tie", "blank")
MEANT: Mapping[str, Mapping[str, str]] = {
    "math": OF_PEERS,
    "deepscaler": OF_PEERS,
    "dapo": OF_PEERS,
    "math_answer": NUMBERS | dict.fromkeys(TEXTS, TEXT_ALONE),
    "gsm8k": NUMBERS,
    "math_verify": {
        "stop": "the library reads no number with a full stop in a box",
        **dict.fromkeys(["unit", "units"], "the library multiplies the letters of words"),
        "millions": "the library takes any text for a unit",
        **dict.fromkeys(["text", "bold", "roman"], "the library reads no decimal in a command of text"),
        **{f"{kind} by {name}": "no separator to the library" for kind in ("groups", "label") for name in SEPARATORS},
    },
}
"""Forms by reward that it decides otherwise than by the truth, with the reason."""
ENDLESS = {"tower", "factorial", "power", "square", "root"}
"""Forms that the library may compute for ever; where it runs, a call has a limit."""


def decided_otherwise(name: str, table: list[Form]) -> set[str]:
    """Return the forms in a table of which a reward's decision is not the truth; labels that it does not take are left
    out.
    """
    found = set()
    for form in table:
        if name == "gsm8k" and to_number(form.label) is None:
            continue
        if score(name, form) != form.right:
            found.add(form.name)
    return found


@pytest.mark.parametrize("name", sorted(REWARDS.keys() - {"math_verify"}))
def test_each_form_has_its_score_or_a_reason(name: str) -> None:
    assert len(forms()) > 900
    assert decided_otherwise(name, forms()) == set(MEANT[name])


@pytest.mark.skipif(find_spec("math_verify") is None, reason="needs math-verify")
def test_the_library_decides_the_same_but_for_a_reason() -> None:
    """On a third of the labels: a call takes 10 ms."""
    table = [
        form for form in forms() if form.name not in ENDLESS and form.label not in (*WHOLE[2:], *LARGE[2:], *PARTS[1:])
    ]
    assert len(table) > 300
    assert decided_otherwise("math_verify", table) == set(MEANT["math_verify"])


@pytest.mark.parametrize("name", ["math_answer", "gsm8k"])
@pytest.mark.parametrize(
    ("response", "label", "right"),
    [
        (r"#### 1{,}234", "1234", True),
        (r"#### \$1,\!234.50 in all", "1234.5", True),
        (r"so there are 1{,}234", "1234", True),
        (r"so there are 1\,234 of 5", "1234", False),
        (r"#### \boxed{18}", "18", True),
        (r"#### $\boxed{x+18}$", "18", False),
        ("#### 18 eggs of 20", "18", True),
        ("\N{MINUS SIGN}1,234", "-1234", True),
        (r"\boxed{-\$1{,}234}", "-1234", True),
        (r"\boxed{100,200}", "100", False),
        (r"\boxed{1 3/4}", "1.75", True),
        (r"\boxed{1 2}", "12", False),
    ],
)
def test_numbers_outside_of_boxes_have_the_same_forms(name: str, response: str, label: str, right: bool) -> None:
    asked = RewardRequest(prompt="", response=response, label=label, status=Status.COMPLETED)
    assert REWARDS[name](asked) == right
