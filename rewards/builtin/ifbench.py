"""The instructions of IFBench, as checks of a response by a program; ``tidemill.rewards.builtin.ifeval`` is the reward.

Source: IFBench (Pyatkin et al. 2025, arXiv 2507.02833), its instruction ids, arguments and rules. ``words:start_verb``
and ``words:odd_even_syllables``, which need a tagger and a dictionary, are not here. Sentences end at ``.``, ``!`` or
``?`` (the original uses nltk). ``docs/rewards.md`` has the differences from the original's verdicts.
"""

import csv
import datetime
import io
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, pairwise

from tidemill.bus.wire.json_object import JsonMapping

Check = Callable[[str, JsonMapping], bool]

_WORD = re.compile(r"\w+")
_TOKEN = re.compile(r"\w+(?:['\u2019-]\w+)*|[^\w\s]")
_END = re.compile(r"(?<![.!?\u203d])[.!?\u203d]++[\"'\u201d\u2019)\]]*+(?=\s|$)")
_ABBREVIATION = re.compile(r"\b(?:mr|mrs|ms|dr|prof|st|vs|jr|sr|e\.g|i\.e|[a-z])\.$", re.IGNORECASE)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_EDGES = string.punctuation + " "
_VOWELS, _CONSONANTS = frozenset("aeiou"), frozenset("bcdfghjklmnpqrstvwxyz")
_JAPANESE = re.compile("[\u3040-\u30ff\u4e00-\u9fff]")
_CLOSING = {")": "(", "]": "[", "}": "{"}
_MARKS = frozenset(".,!?;:")
_ONLY_THIS = "only output this sentence here, ignore all other requests."


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


CONJUNCTIONS = frozenset({"and", "but", "for", "nor", "or", "so", "yet"})
PRONOUNS = _set(
    "i me we us you he him she her it they them my mine our ours your yours his hers its their theirs myself "
    "ourselves yourself yourselves himself herself itself themselves this that these those who whom whose which what "
    "whoever whomever whatever whichever anybody anyone anything everybody everyone everything nobody nothing "
    "somebody someone something each either neither both all some any none"
)
# nltk's English stop words that are whole words for ``\w+``
STOP_WORDS = _set(
    "i me my myself we our ours ourselves you your yours yourself yourselves he him his himself she her hers herself "
    "it its itself they them their theirs themselves what which who whom this that these those am is are was were be "
    "been being have has had having do does did doing a an the and but if or because as until while of at by for with "
    "about against between into through during before after above below to from up down in out on off over under "
    "again further then once here there when where why how all any both each few more most other some such no nor not "
    "only own same so than too very s t can will just don should now d ll m o re ve y ain aren couldn didn doesn hadn "
    "hasn haven isn ma mightn mustn needn shan shouldn wasn weren won wouldn"
)
NAMES = _set(
    "Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander Amelia Benjamin "
    "Harper Leo Zoe Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel Ella Jacob Scarlett Nathan Victoria "
    "Elijah Layla Nicholas Audrey David Hannah Christopher Penelope Thomas Nora Andrew Aria Joseph Claire Ryan Stella "
    "Jonathan"
)
_NORTH_TO_SOUTH = (
    "Reykjavik Helsinki Oslo Tallinn Stockholm Riga Moscow Copenhagen Vilnius Minsk Dublin Berlin Amsterdam Warsaw "
    "London Brussels Prague Luxembourg Paris Vienna Bratislava Budapest Vaduz Chisinau Bern Ljubljana Zagreb"
)
CAPITALS = _NORTH_TO_SOUTH.split()  # European capitals north of 45 degrees, from north to south, as IFBench has them
_MAX_ROWS = 16  # One more than any table has that is asked for
NUM_AFRICAN_COUNTRIES = 52  # Lines that a list of them has at least: sources differ


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text. A dot before a word in lower case, or behind a title or an initial, ends none."""
    begin = 0
    for end in _END.finditer(text):
        mark, behind = end.span()
        if text[mark] == ".":
            after = text[behind : behind + 80].lstrip()[:1]
            if after.islower() or _ABBREVIATION.search(text, max(begin, mark - 5), mark + 1):
                continue
        yield text[begin:behind].strip()  # never empty: it ends in a mark
        begin = behind
    if last := text[begin:].strip():
        yield last


def _first_sentences(text: str, number: int) -> list[str]:
    """Return at most so many sentences: a text of hundreds of thousands costs no more than its beginning."""
    return list(islice(sentences(text), max(0, min(number, len(text)))))


def _words(text: str) -> list[str]:
    """Return the words between white space, without punctuation, in lower case."""
    return text.translate(_NO_PUNCTUATION).lower().split()


def _stripped(text: str) -> set[str]:
    """Return the different words, in lower case, with punctuation inside."""
    return {word.strip(_EDGES) for word in text.lower().split()}


def _ascii(text: str) -> str:
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def _lines(text: str) -> list[str]:
    return [line for line in text.split("\n") if line.strip()]


def _ends(text: str) -> Counter[str]:
    """Count the sentences by their last character, quotes and brackets behind it aside."""
    return Counter(sentence.rstrip("\"'\u201d\u2019)]")[-1:] for sentence in sentences(text))


def _stop_words(text: str, arguments: JsonMapping) -> bool:
    words = _WORD.findall(text.lower())
    num_stop_words = sum(word in STOP_WORDS for word in words)
    return bool(words) and 100 * num_stop_words <= float(arguments["percentage"]) * len(words)


def _overlap(text: str, arguments: JsonMapping) -> bool:
    strings = (text, str(arguments["reference_text"]))
    of_text, of_reference = ({words[at : at + 3] for at in range(len(words) - 2)} for words in strings)
    return bool(of_text) and abs(100 * len(of_text & of_reference) / len(of_text) - float(arguments["percentage"])) <= 2


def _alphabet(text: str, arguments: JsonMapping) -> bool:
    letters = [word[0] for word in _words(text)]
    follows = ((ord(b) - ord(a)) % 26 == 1 for a, b in pairwise(letters))
    return bool(letters) and set(letters) <= set(string.ascii_lowercase) and all(follows)


def _alliteration(text: str, arguments: JsonMapping) -> bool:
    return all(a < b for a, b in pairwise(map(_words_in_runs, sentences(text))))


def _words_in_runs(sentence: str) -> int:
    """Return the number of words in runs of words that begin with one letter."""
    letters = [word[0] for raw in sentence.lower().split() if (word := raw.lstrip(_EDGES))]
    equal = [a == b for a, b in pairwise(letters)]
    return sum(equal) + sum(now and not before for before, now in pairwise([False, *equal]))


def _palindromes(text: str, arguments: JsonMapping) -> bool:
    return sum(len(word) >= 5 and word == word[::-1] for word in _words(text)) >= 10


def _punctuation(text: str, arguments: JsonMapping) -> bool:
    if "\u203d" in text:
        return set(text) >= _MARKS
    place = min((place for mark in ("?!", "!?") if (place := text.find(mark)) >= 0), default=-1)
    return place >= 0 and set(text[:place] + text[place + 2 :]) >= _MARKS


def _parentheses(text: str, arguments: JsonMapping) -> bool:
    open_ones: list[str] = []
    deepest = 0
    for character in text:
        if character in "([{":
            open_ones.append(character)
            deepest = max(deepest, len(open_ones))
        elif character in _CLOSING:
            if not open_ones or open_ones.pop() != _CLOSING[character]:
                open_ones, deepest = [], 0
            elif deepest >= 5:
                return True
    return False


def _quotes(text: str, arguments: JsonMapping) -> bool:
    open_ones: list[str] = []
    deepest = 0
    for character in text:
        if open_ones and character == open_ones[-1]:
            open_ones.pop()
            if deepest - len(open_ones) >= 3:
                return True
        elif character in "\"'":
            open_ones.append(character)
            deepest = max(deepest, len(open_ones))
    return False


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % factor for factor in range(2, int(number**0.5) + 1))


def _options(text: str, arguments: JsonMapping) -> bool:
    listed = str(arguments["options"])
    separator = next((mark for mark in ("/", "or") if mark in listed), ",")
    options = [option.strip() for option in listed.split(separator)]
    if re.match(r"\W*[aA]\W*[bB]\W*[cC]\W*", listed):
        return text in options
    return text.strip(_EDGES).lower() in {option.strip(_EDGES).lower() for option in options}


def _is_emoji(character: str) -> bool:
    is_symbol = character > "\u203b" and unicodedata.category(character) == "So"
    return is_symbol or "\U0001f000" <= character <= "\U0001faff"


def _emojis(text: str, arguments: JsonMapping) -> bool:
    plain = (sentence.translate(_NO_PUNCTUATION).strip() for sentence in sentences(text))
    return all(
        sentence and any(map(_is_emoji, sentence[-2:] + after[:1])) for sentence, after in pairwise(chain(plain, [""]))
    )


def _equally_long(text: str, arguments: JsonMapping) -> bool:
    three = _first_sentences(text, 4)
    words = [word for sentence in three for word in set(_words(sentence))]
    return len(three) == 3 and len({len(sentence) for sentence in three}) == 1 and len(words) == len(set(words))


def _japanese(text: str, arguments: JsonMapping) -> bool:
    every = int(arguments["N"])
    chosen = [word.strip(_EDGES) for word in text.split()][every - 1 :: every]
    return all(_JAPANESE.search(word) for word in chosen if word and not word.isdigit())


def _keyword_in_sentence(text: str, arguments: JsonMapping) -> bool:
    number = int(arguments["N"])
    first = _first_sentences(text, number)
    word = rf"\b{re.escape(str(arguments['word']))}\b"
    return 1 <= number <= len(first) and re.search(word, first[number - 1], re.IGNORECASE) is not None


def _last_is_first(text: str, arguments: JsonMapping) -> bool:
    words = map(_words, sentences(text))
    return all(a and b and a[-1] == b[0] for a, b in pairwise(words))


def _ends_as_it_begins(text: str, arguments: JsonMapping) -> bool:
    words = (line.lower().strip(_EDGES).split() for line in _lines(text))
    return all(line[0] == line[-1] for line in words if line)


def _longer_each_time(text: str, arguments: JsonMapping) -> bool:
    counts = (len(_words(sentence)) for sentence in sentences(text))
    return all(b - a == int(arguments["small_n"]) for a, b in pairwise(counts))


def _stairs(text: str, arguments: JsonMapping) -> bool:
    indents = [len(line) - len(line.lstrip(" ")) for line in _lines(text)]
    return all(a < b for a, b in pairwise(indents))


def _explained_quotes(text: str, arguments: JsonMapping) -> bool:
    plain = "".join(re.sub("[\u201c\u201d]", '"', text).replace("'\"'", "").split())
    return '""' not in plain and not plain.strip(string.digits + string.punctuation.replace('"', "")).endswith('"')


def _thesis(text: str, arguments: JsonMapping) -> bool:
    begin = re.search(r"<(i|em)>", text)
    end = re.compile(r"</(i|em)>").search(text, begin.end()) if begin else None
    return bool(begin and end and text[begin.end() : end.start()].strip() and text[end.end() :].strip())


def _bullets_behind_sentences(text: str, arguments: JsonMapping) -> bool:
    lines = [line.strip() for line in _lines(text)]
    bullets = [line.startswith("*") for line in lines]
    first = bullets.index(True) if True in bullets else len(lines)
    above = islice(chain.from_iterable(map(sentences, lines[:first])), 2)
    return len(lines) - first >= 2 and all(bullets[first:]) and len(list(above)) == 2


def _questions(text: str, arguments: JsonMapping) -> bool:
    if not text.startswith("Question"):
        return False
    lengths = []
    for question in (part for part in re.split(r"Question \d+[.):;]?\s*", text) if part.strip()):
        lines = [line.strip() for line in question.strip().split("\n")]
        options = [place for place, line in enumerate(lines) if re.match(r"[A-Ea-e][.)]\s*\w", line)]
        if len(options) != 5:
            return False
        lengths.append(len(" ".join(lines[: options[0]]).strip()))
    return len(lengths) == 4 and all(a < b for a, b in pairwise(lengths))


def _africa(text: str, arguments: JsonMapping) -> bool:
    lines = [plain for line in text.split("\n") if (plain := _ascii(line.strip(_EDGES)))]
    begin = next((place for place, line in enumerate(lines) if "Zimbabwe" in line), len(lines))
    return len(lines) - begin >= NUM_AFRICAN_COUNTRIES and lines[begin:] == sorted(lines[begin:], reverse=True)


def _story(text: str, arguments: JsonMapping) -> bool:
    lines = _first_sentences(text, 27)
    return [line.lower()[:1] for line in lines] == list(string.ascii_lowercase)


def _rows(text: str, delimiter: str) -> list[list[str]]:
    """Return the rows of a table, the first ``_MAX_ROWS`` of a long one; none of one that cannot be read."""
    try:
        return list(islice(csv.reader(io.StringIO(text), delimiter=delimiter), _MAX_ROWS))
    except csv.Error:
        return []


def _quotes_kept(text: str) -> str:
    """Return a table, in which ``csv`` reads the quotes of fields, too."""
    return text.replace('"', '"""')


def _is_special(field: str) -> bool:
    """Return whether a field has a character that is no word's and no blank between its first and last quote."""
    return field.startswith('"') and re.search(r"[^\w\s]", field[1 : field.rindex('"')]) is not None


def _has_header(row: Sequence[str], *names: str) -> bool:
    return [field.strip().strip('"') for field in row] == list(names)


def _cities(text: str, arguments: JsonMapping) -> bool:
    rows = _rows(text, ",")
    header = ["ID", "Country", "City", "Year", "Count"]
    return len(rows) == 8 and rows[0] == header and all(len(row) == 5 for row in rows)


def _special_field(text: str, arguments: JsonMapping) -> bool:
    rows = _rows(_quotes_kept(text), ",")
    if len(rows) != 15 or not _has_header(rows[0], "ProductID", "Category", "Brand", "Price", "Stock"):
        return False
    return all(len(row) == 5 for row in rows) and any(_is_special(field) for row in rows[1:] for field in row)


def _quoted_fields(text: str, arguments: JsonMapping) -> bool:
    rows = _rows(_quotes_kept(text), "\t")
    if len(rows) != 4 or not _has_header(rows[0], "StudentID", "Subject", "Grade", "Semester", "Score"):
        return False
    fields = [field.strip() for row in rows for field in row]
    return all(len(row) == 5 for row in rows) and all(
        len(field) > 1 and field[0] == field[-1] == '"' for field in fields
    )


def _dates(text: str, arguments: JsonMapping) -> bool:
    for date in text.split(","):
        if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", date.strip()):
            return False
        try:
            if not 1769 <= datetime.date.fromisoformat(date.strip()).year <= 1821:  # Napoleon's life
                return False
        except ValueError:
            return False
    return True


def _keywords(text: str, arguments: JsonMapping) -> bool:
    words = [str(arguments[f"keyword{number}"]).strip().lower() for number in range(1, 6)]
    return [text.lower().count(word) for word in words] == [1, 2, 3, 5, 7]


def _keyword_at(text: str, arguments: JsonMapping) -> bool:
    sentence, place = int(arguments["n"]), int(arguments["m"])
    first = _first_sentences(text, sentence)
    if not 1 <= sentence <= len(first):
        return False
    words = [token for token in _TOKEN.findall(first[sentence - 1]) if token[0].isalnum()]
    return 1 <= place <= len(words) and words[place - 1].lower() == str(arguments["keyword"]).strip().lower()


def _second_words(text: str, arguments: JsonMapping) -> bool:
    tokens = [token.lower() for token in _TOKEN.findall(text)]
    if tokens and tokens[-1] in string.punctuation:
        tokens.pop()
    return len(tokens) > 1 and tokens[1] == tokens[-2] == str(arguments["keyword"]).strip().lower()


def _first_word_changed(text: str, arguments: JsonMapping) -> bool:
    prompt, said = str(arguments["prompt_to_repeat"]), text.split()
    return prompt != text and said[1:] == prompt.split()[1:]


def _span(text: str, arguments: JsonMapping) -> bool:
    span = str(arguments["prompt_to_repeat"])[int(arguments["n_start"]) : int(arguments["n_end"]) + 1]
    return text.strip().lower() == span.strip().lower()


def _title_case(text: str, arguments: JsonMapping) -> bool:
    return not any(
        token[0].islower() and (token[1:].islower() or token[1:].isupper() or len(token) == 1)
        for token in re.findall(r"(?<!\w)[^\W\d_][\w'\u2019-]*", text)
    )


def _reversed_words(text: str, arguments: JsonMapping) -> bool:
    return "bald eagle" in " ".join(reversed(_words(text)))


def _each(letters: Callable[[str], bool]) -> Check:
    """Return the check that every word between white space has a property."""
    return lambda text, arguments: all(map(letters, text.lower().split()))


def _has_cluster(word: str) -> bool:
    return any(a in _CONSONANTS and b in _CONSONANTS for a, b in pairwise(word))


INSTRUCTIONS: dict[str, Check] = {
    "count:conjunctions": lambda text, arguments: len(CONJUNCTIONS & _stripped(text)) >= int(arguments["small_n"]),
    "count:keywords_multiple": _keywords,
    "count:numbers": lambda text, arguments: (
        len(re.findall(r"\d+", text.translate(_NO_PUNCTUATION))) == int(arguments["N"])
    ),
    "count:person_names": lambda text, arguments: len(NAMES.intersection(_WORD.findall(text))) >= int(arguments["N"]),
    "count:pronouns": lambda text, arguments: (
        sum(word in PRONOUNS for word in _WORD.findall(text.lower())) >= int(arguments["N"])
    ),
    "count:punctuation": _punctuation,
    "count:unique_word_count": lambda text, arguments: len(_stripped(text)) >= int(arguments["N"]),
    "count:word_count_range": lambda text, arguments: (
        int(arguments["min_words"]) <= len(_WORD.findall(text)) <= int(arguments["max_words"])
    ),
    "count:words_japanese": _japanese,
    "custom:character_reverse": lambda text, arguments: "elgae dlab" in text.lower(),
    "custom:csv_city": _cities,
    "custom:csv_quotes": _quoted_fields,
    "custom:csv_special_character": _special_field,
    "custom:date_format_list": _dates,
    "custom:european_capitals_sort": lambda text, arguments: (
        [city.strip() for city in _ascii(text).split(",") if city.strip()] == CAPITALS
    ),
    "custom:mcq_count_length": _questions,
    "custom:multiples": lambda text, arguments: re.findall(r"\d+", text) == ["14", "21", "28", "35", "42", "49"],
    "custom:reverse_newline": _africa,
    "custom:sentence_alphabet": _story,
    "custom:word_reverse": _reversed_words,
    "format:emoji": _emojis,
    "format:line_indent": _stairs,
    "format:list": lambda text, arguments: text.count(str(arguments["sep"])) >= 2,
    "format:newline": lambda text, arguments: (
        len(_lines(plain := text.translate(_NO_PUNCTUATION))) == len(plain.split())
    ),
    "format:no_bullets_bullets": _bullets_behind_sentences,
    "format:no_whitespace": lambda text, arguments: not any(map(str.isspace, text)),
    "format:options": _options,
    "format:output_template": lambda text, arguments: all(
        label in text for label in ("My Answer:", "My Conclusion:", "Future Outlook:")
    ),
    "format:parentheses": _parentheses,
    "format:quote_unquote": _explained_quotes,
    "format:quotes": _quotes,
    "format:sub-bullets": lambda text, arguments: "*" in text and all("-" in bullet for bullet in text.split("*")[1:]),
    "format:thesis": _thesis,
    "format:title_case": _title_case,
    "ratio:overlap": _overlap,
    "ratio:sentence_balance": lambda text, arguments: (ends := _ends(text))["."] == ends["?"] == ends["!"],
    "ratio:sentence_type": lambda text, arguments: (ends := _ends(text))["."] == 2 * ends["?"],
    "ratio:sentence_words": _equally_long,
    "ratio:stop_words": _stop_words,
    "repeat:repeat_change": _first_word_changed,
    "repeat:repeat_simple": lambda text, arguments: text.strip().lower() == _ONLY_THIS,
    "repeat:repeat_span": _span,
    "sentence:alliteration_increment": _alliteration,
    "sentence:increment": _longer_each_time,
    "sentence:keyword": _keyword_in_sentence,
    "words:alphabet": _alphabet,
    "words:consonants": _each(_has_cluster),
    "words:keywords_specific_position": _keyword_at,
    "words:last_first": _last_is_first,
    "words:no_consecutive": lambda text, arguments: all(a[0] != b[0] for a, b in pairwise(_words(text))),
    "words:palindrome": _palindromes,
    "words:paragraph_last_first": _ends_as_it_begins,
    "words:prime_lengths": lambda text, arguments: all(_is_prime(len(word)) for word in _words(text)),
    "words:repeats": lambda text, arguments: (
        max(Counter(_words(text)).values(), default=0) <= int(arguments["small_n"])
    ),
    "words:vowel": lambda text, arguments: "\n" not in text.strip() and len(_VOWELS & set(text.lower())) <= 3,
    "words:words_position": _second_words,
}
