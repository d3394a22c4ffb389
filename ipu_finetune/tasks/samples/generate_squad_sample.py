# SPDX-License-Identifier: Apache-2.0
"""Write `squad_sample.json`: invented encyclopedia articles with questions, in SQuAD v1.1 JSON.

    python -m ipu_finetune.tasks.samples.generate_squad_sample

Everything in it is made up: towns, ships, laboratories, festivals, companies, railways and surveys, with people, places
and facts that no two articles share. Each paragraph holds several persons, places, years and numbers, and the questions
paraphrase the sentences, so that a model has to tell the facts apart.

The words stand in `squad_sample.txt`:

```
@@ domain    what an article is about. `k = town | role = mayor`: words for <k> and <role>; S: the name, home: where
== aspect    what a paragraph is about; its blocks are separated by empty lines
+ or -       one wording of the block's sentence; a `+` block opens the paragraph, the others follow in any order
? slot: …    questions, separated by ` / `, that the slot's text answers
:: pool      phrases for the slots of that name, one a line; `*` after the name lets a phrase come back
[a|b]        either of the two; #T: a new place
{P_x}        a person; {L_x} a place; {Y1} < {Y2} years; {N1=2-9 weeks} a number and unit; {pool} or {pool_x} a phrase
{S} {T}      the article's name; its name or "the town"
```

Only `random.Random.random` is drawn from: the one method whose sequence is the same in every Python version.
"""

import itertools
import json
import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple, TypeVar

__all__ = ["Article", "Mention", "Paragraph", "Question", "generate", "main", "to_squad"]

WORDS = Path(__file__).with_name("squad_sample.txt")
OUTPUT = Path(__file__).with_name("squad_sample.json")
SEED = 20
ARTICLES = 35  # a multiple of the 7 domains; 7 and 5 share no factor, so every fifth article meets every domain
PARAGRAPHS = 4
YEARS = 7  # Y0 to Y6, drawn in rising order
SENTENCES = (4, 5, 5, 6, 6, 6, 7)  # after the opening one; drawn evenly
LONG_ARTICLES = (3, 10, 22, 29)  # their last paragraph tells two aspects in full and passes 384 tokens
QUESTIONS = (4, 4, 5, 5)
# Clauses are rare among the slots and persons frequent: kinds are drawn first to level them.
KINDS = ("person", "person", "place", "place", "year", "year", "number", "number", "phrase", "phrase", "clause")

FIRST_NAMES = (
    "Ada Alma Anton Arno Bela Berta Boris Carla Casper Celia Clara Conrad Dora Edgar Edith Elias Elsa Emil Enid "
    "Erik Esther Felix Flora Frida Georg Gilda Greta Gustav Hanna Hector Hedda Henrik Hilda Hugo Ida Igor Ines "
    "Irma Ivan Jasper Joan Jonas Judith Karl Klara Lars Laura Leon Lydia Magda Marta Matilda Max Mira Nils Nora "
    "Olga Oscar Otto Paula Petra Ralph Rosa Rufus Selma Silas Simon Sonia Stella Sven Thea Tilda Tobias Ulla "
    "Ursula Vera Viktor Walter Wanda Wilma"
)
SURNAMES = (
    "Ab Al Bar Bel Bram Cal Cor Dal Dor El Fal Fen Gar Gil Hal Har Jor Kel Kin Lam Lor Mal Mer Nor Pel Quin Ral "
    "Ros Sal Ser Tal Tor Val Ver Wal Wes Yar Zel"
)
SURNAME_ENDS = (
    "bury berg croft dahl den dine er gart ham inger kin ler lock mann more nik ock quist ridge sen ster trom vane wick"
)
PLACES = (
    "Amber Arn Birch Black Bracken Brant Clay Crow Dun Eller Fallow Fern Flint Frost Glen Gold Grim Hare Hazel "
    "Heron Holly Iron Kestrel Lark Linden Marrow Mill Moss Nettle Oster Otter Pine Raven Reed Rook Rush Sable "
    "Salt Sedge Sorrel Stone Swan Tarn Thistle Thorn Under Vel Wether Willow Wind Wolf Wren Yarrow"
)
PLACE_ENDS = (
    "beck bridge brook by cliff combe dale fell field ford gate haven holm hurst leigh mere mouth stead stow "
    "thorpe well wold"
)

T = TypeVar("T")
_SLOT = re.compile(r"\{(\w+)(?:=(\d+)-(\d+)(?: ([^}]*))?)?\}")
_CHOICE = re.compile(r"\[([^\]]*)\]")


class Mention(NamedTuple):
    """A slot's text where it stands in its paragraph; `kind` is person, place, year, number, phrase or clause."""

    slot: str
    kind: str
    text: str
    start: int


class Question(NamedTuple):
    """One question and the mention that answers it."""

    id: str
    text: str
    answer: Mention


@dataclass
class Paragraph:
    """A paragraph with every mention in it, in order, and its questions."""

    context: str
    mentions: List[Mention]
    questions: List[Question] = field(default_factory=list)


class Article(NamedTuple):
    """One invented subject and its paragraphs."""

    title: str
    domain: str
    paragraphs: List[Paragraph]


class _Block(NamedTuple):
    aspect: str
    wordings: List[str]
    questions: Dict[str, List[str]]


class _Words(NamedTuple):
    domains: Dict[str, Dict[str, str]]
    aspects: Dict[str, List[_Block]]
    pools: Dict[str, Tuple[bool, List[str]]]


class _Draw:
    """Seeded choices made from `random()` alone."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def below(self, limit: int) -> int:
        return int(self._random.random() * limit)

    def one(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[T]) -> List[T]:
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in range(len(left))]


class _Facts:
    """Supplies names and phrases; hands each out once over the whole data set."""

    def __init__(self, words: _Words, draw: _Draw) -> None:
        self._draw = draw
        self._names = draw.shuffled([a + b for a in SURNAMES.split() for b in SURNAME_ENDS.split()])
        self._places = draw.shuffled([a + b for a in PLACES.split() for b in PLACE_ENDS.split()])
        self._pools = words.pools
        self._left = {
            name: draw.shuffled([phrase for line in lines for phrase in _expand(line)])
            for name, (_, lines) in words.pools.items()
        }

    def person(self) -> str:
        return f"{self._draw.one(FIRST_NAMES.split())} {self._names.pop()}"

    def place(self) -> str:
        name = self._places.pop()
        kind = self._draw.below(10)
        return (
            f"Port {name}"
            if kind == 0
            else f"{self._draw.one(('Upper', 'Lower', 'East', 'West'))} {name}"
            if kind == 1
            else name
        )

    def phrase(self, slot: str) -> str:
        pool = slot if slot in self._pools else slot.rpartition("_")[0]
        if pool not in self._pools:
            raise KeyError(
                f"squad_sample.txt: slot {{{slot}}} has no pool ':: {pool or slot}'; add one or correct the slot"
            )
        again, _ = self._pools[pool]
        left = self._left[pool]
        if not left:
            raise ValueError(f"squad_sample.txt: pool ':: {pool}' is used up; add phrases, for none may be told twice")
        return self._draw.one(left) if again else left.pop()


def _expand(line: str) -> List[str]:
    """Every phrase that the choices of a pool's line stand for."""
    parts = _CHOICE.split(line)
    return [
        "".join(picked)
        for picked in itertools.product(*([p] if i % 2 == 0 else p.split("|") for i, p in enumerate(parts)))
    ]


def _read_words(text: str) -> _Words:
    words = _Words({}, {}, {})
    section: List[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        mark, _, rest = line.partition(" ")
        if not line or mark == "#":
            section = section if line else [*section[:2]]
        elif mark in ("@@", "==", "::"):
            name, _, flag = rest.partition(" ")
            section = [mark, name]
            if mark == "@@":
                words.domains[name] = {}
            elif mark == "==":
                words.aspects[name] = []
            else:
                words.pools[name] = (flag == "*", [])
        elif section[:1] == ["@@"]:
            for pair in line.split(" | ") if " = " in line and "[" not in line else [line]:
                key, _, value = pair.partition(" = ")
                words.domains[section[1]][key] = value
        elif section[:1] == ["::"]:
            words.pools[section[1]][1].append(line)
        elif section[:1] == ["=="] and mark in ("+", "-"):
            if len(section) == 2:
                words.aspects[section[1]].append(_Block(section[1], [], {}))
                section.append("block")
            words.aspects[section[1]][-1].wordings.append(rest)
        elif section[2:] and mark == "?":
            slot, _, questions = rest.partition(": ")
            words.aspects[section[1]][-1].questions[slot] = questions.split(" / ")
        else:
            raise ValueError(
                f"squad_sample.txt, line {number}: {line!r} fits no section; see the notation in this module"
            )
    return words


def _kind(slot: str) -> str:
    fixed = {"P": "person", "L": "place", "Y": "year", "N": "number"}
    if slot[0] in fixed:
        return fixed[slot[0]]
    return "clause" if slot.startswith("why_") or slot == "complaint" else "phrase"


class _Telling:
    """Writes one paragraph: fills slots, keeps the offset of each, and asks."""

    def __init__(
        self, facts: _Facts, draw: _Draw, fixed: Dict[str, str], domain: Dict[str, str], first_year: int
    ) -> None:
        self._facts, self._draw, self._domain, self._fixed = facts, draw, domain, fixed
        self._values: Dict[str, Dict[str, str]] = {}
        self.last_year = first_year
        self.context = ""
        self.mentions: List[Mention] = []
        self._asked: List[Tuple[_Block, Mention]] = []

    def _plain(self, text: str) -> str:
        return re.sub(r"<(\w+)>", lambda match: self._domain[match.group(1)], text)

    def _slots(self, aspect: str) -> Dict[str, str]:
        """The values of an aspect's slots: its years from the start, the others once they are told."""
        if aspect not in self._values:
            self._values[aspect] = dict(self._fixed)
            for index in range(YEARS):
                self.last_year += 1 + self._draw.below(5)
                self._values[aspect][f"Y{index}"] = str(self.last_year)
        return self._values[aspect]

    def _value(self, match: "re.Match[str]", aspect: str) -> str:
        slot, low, high, unit = match.groups()
        values = self._slots(aspect)
        if slot == "T":
            return values["S"] if self._draw.below(2) else f"the {self._domain['k']}"
        if slot not in values:
            if low:
                value = int(low) + self._draw.below(int(high) - int(low) + 1)
                value = value // 50 * 50 if value >= 1000 else value // 5 * 5 if value >= 200 else value
                text = f"{value:,}" + (f" {unit}" if unit else "")
            elif slot[:2] == "P_":
                text = self._facts.person()
            elif slot[:2] == "L_":
                text = self._facts.place()
            else:
                text = self._facts.phrase(slot)
            values[slot] = text
        return values[slot]

    def tell(self, block: _Block) -> None:
        """Append one sentence."""
        template = self._plain(self._draw.one(block.wordings))
        if self.context:
            self.context += " "
        begin = len(self.context)
        found: List[Mention] = []
        position = 0
        for match in _SLOT.finditer(template):
            self.context += template[position : match.start()]
            text = self._value(match, block.aspect)
            if len(self.context) == begin:
                text = text[0].upper() + text[1:]
            if match.group(1) not in ("S", "T", "L_home"):
                found.append(Mention(match.group(1), _kind(match.group(1)), text, len(self.context)))
            self.context += text
            position = match.end()
        self.context += template[position:]
        self.mentions += found
        self._asked += [(block, mention) for mention in found if mention.slot in block.questions]

    def ask(self, count: int, prefix: str) -> List[Question]:
        """Put `count` questions to the paragraph, each to another sentence as far as there are any."""
        questions: List[Question] = []
        kinds = [mention.kind for mention in self.mentions]
        left = [entry for entry in self._draw.shuffled(self._asked) if kinds.count(entry[1].kind) > 1]
        while len(questions) < count:
            kind = self._draw.one(KINDS)
            choice = [entry for entry in left if entry[1].kind == kind]
            if not choice:
                continue
            block, mention = choice[0]
            template = self._plain(self._draw.one(block.questions[mention.slot]))
            wording = _SLOT.sub(lambda match, aspect=block.aspect: self._value(match, aspect), template)  # type: ignore[misc]
            questions.append(Question(f"{prefix}q{len(questions)}", wording[0].upper() + wording[1:], mention))
            fresh = [entry for entry in left if entry[0] is not block]
            left = fresh if fresh else [entry for entry in left if entry[1] is not mention]
        order = {mention: index for index, mention in enumerate(self.mentions)}
        return sorted(questions, key=lambda question: order[question.answer])


def generate(seed: int = SEED) -> List[Article]:
    """Write the articles.

    Args:
        seed: the same seed gives the same articles in every Python version.
    """
    words = _read_words(WORDS.read_text(encoding="utf-8"))
    draw = _Draw(seed)
    facts = _Facts(words, draw)
    articles = []
    domains = list(words.domains)
    for number in range(ARTICLES):
        name = domains[number % len(domains)]
        domain = words.domains[name]
        subject = draw.one(_expand(domain["S"])).replace("#T", facts.place().split()[-1])
        fixed = {"S": subject, "L_home": domain["home"].replace("#T", facts.place())}
        aspects = sorted(draw.shuffled(range(len(words.aspects)))[:PARAGRAPHS])
        year = 1790 + draw.below(40)
        paragraphs = []
        for index, aspect in enumerate(aspects):
            blocks = list(words.aspects.values())[aspect]
            year = max(year, 1915) if aspect == len(words.aspects) - 1 else year
            telling = _Telling(facts, draw, fixed, domain, year)
            told = draw.shuffled(blocks[1:])[: draw.one(SENTENCES)]
            if number in LONG_ARTICLES and index == PARAGRAPHS - 1:
                spare = next(i for i in range(len(words.aspects)) if i not in aspects)
                told = draw.shuffled(blocks[1:] + list(words.aspects.values())[spare][1:])
            for block in [blocks[0], *told]:
                telling.tell(block)
            questions = telling.ask(draw.one(QUESTIONS), f"a{number:02d}p{index}")
            paragraphs.append(Paragraph(telling.context, telling.mentions, questions))
            year = telling.last_year
        title = subject[4:] if subject.startswith("the ") else subject
        articles.append(Article(title, name, paragraphs))
    return articles


def to_squad(articles: Sequence[Article]) -> Dict[str, Any]:
    """Turn articles into the SQuAD v1.1 structure."""
    return {
        "version": "1.1",
        "data": [
            {
                "title": article.title,
                "paragraphs": [
                    {
                        "context": paragraph.context,
                        "qas": [
                            {
                                "id": question.id,
                                "question": question.text,
                                "answers": [{"text": question.answer.text, "answer_start": question.answer.start}],
                            }
                            for question in paragraph.questions
                        ],
                    }
                    for paragraph in article.paragraphs
                ],
            }
            for article in articles
        ],
    }


def main(output: Path = OUTPUT) -> None:
    """Write the data set to `output`."""
    text = json.dumps(to_squad(generate()), ensure_ascii=False, indent=1) + "\n"
    output.write_bytes(text.encode("utf-8"))


if __name__ == "__main__":
    main()
