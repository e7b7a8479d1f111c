"""Synthetic people, and the texts and questions about them in English and Korean."""

import datetime
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import yaml

Language = Literal["en", "ko"]
Gender = Literal["feminine", "masculine"]
_Mention = Literal["name", "pronoun", "omitted"]

# Words and sentence templates; a word is (English, Korean).
_TEXT: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("people.yaml").read_text(encoding="utf-8")
)


def _pairs(words: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(words.items())


def _institutions(kinds: list[dict[str, dict[str, str]]]) -> tuple[tuple[str, str], ...]:
    """Return each name followed by its kind of institution."""
    return tuple(
        (f"{english} {english_kind}", f"{korean} {korean_kind}")
        for kind in kinds
        for english_kind, korean_kind in kind["kind"].items()
        for english, korean in kind["names"].items()
    )


FEMININE_NAMES, MASCULINE_NAMES = _pairs(_TEXT["feminine_names"]), _pairs(_TEXT["masculine_names"])
MIDDLE_NAMES = _pairs(_TEXT["middle_names"])
LAST_NAMES = tuple(
    (english_stem + english_ending, korean_stem + korean_ending)
    for (english_stem, korean_stem), (english_ending, korean_ending) in product(
        _pairs(_TEXT["last_name_stems"]), _pairs(_TEXT["last_name_endings"])
    )
)
ENGLISH_MONTHS: list[str] = _TEXT["english_months"]
CITIES, MAJORS = _pairs(_TEXT["cities"]), _pairs(_TEXT["majors"])
UNIVERSITIES, EMPLOYERS = _institutions(_TEXT["universities"]), _institutions(_TEXT["employers"])
ENGLISH_TEMPLATES: dict[str, list[str]] = _TEXT["english_templates"]
KOREAN_TEMPLATES: dict[str, list[str]] = _TEXT["korean_templates"]
ENGLISH_QUESTIONS: dict[str, str] = _TEXT["english_questions"]
KOREAN_QUESTIONS: dict[str, str] = _TEXT["korean_questions"]

ATTRIBUTES: tuple[str, ...] = (
    "birth_date",
    "birth_city",
    "university",
    "major",
    "employer",
    "work_city",
)

_FIRST_NAMES: tuple[tuple[Gender, tuple[str, str]], ...] = (
    *(("feminine", name) for name in FEMININE_NAMES),
    *(("masculine", name) for name in MASCULINE_NAMES),
)
NUM_NAMES = len(_FIRST_NAMES) * len(MIDDLE_NAMES) * len(LAST_NAMES)

_FIRST_BIRTH_DATE = datetime.date(1950, 1, 1)
_LAST_BIRTH_DATE = datetime.date(1999, 12, 31)

_SUBJECT_PRONOUNS: dict[Gender, str] = {"feminine": "she", "masculine": "he"}
_POSSESSIVE_PRONOUNS: dict[Gender, str] = {"feminine": "her", "masculine": "his"}
# A full name of three words in every later sentence would read like a list.
_LATER_MENTIONS: tuple[_Mention, ...] = ("name", "pronoun", "pronoun", "omitted", "omitted")

_FORMS_AFTER_CONSONANT_AND_VOWEL = {
    "은(는)": ("은", "는"),
    "이(가)": ("이", "가"),
    "을(를)": ("을", "를"),
    "과(와)": ("과", "와"),
    "(으)로": ("으로", "로"),
    "(이)": ("이", ""),
}
_PARTICLE = re.compile(
    f"(.?)({'|'.join(map(re.escape, _FORMS_AFTER_CONSONANT_AND_VOWEL))})", re.DOTALL
)
_FIRST_SYLLABLE, _LAST_SYLLABLE, _NUM_FINALS, _RIEUL = "가", "힣", 28, 8


@dataclass(frozen=True)
class Translated:
    """The same name or value in each language."""

    en: str
    ko: str

    def in_language(self, language: Language) -> str:
        return self.en if language == "en" else self.ko


@dataclass(frozen=True)
class Person:
    """One synthetic person; values are in both languages, so that either can tell the same fact."""

    name: Translated
    gender: Gender
    birth_date: datetime.date
    birth_city: Translated
    university: Translated
    major: Translated
    employer: Translated
    work_city: Translated


def generate_people(num_people: int, seed: int) -> list[Person]:
    """Draw people with distinct names; all other attributes are independent and uniform over their lists.

    A pure function of its arguments. A longer list begins with the people of a shorter one.
    """
    if not 0 <= num_people <= NUM_NAMES:
        raise ValueError(
            f"num_people must be from 0 to {NUM_NAMES}, the number of distinct names: {num_people}"
        )
    rng = random.Random(f"people/{seed}")
    name_indices = _permutation(NUM_NAMES, rng)
    return [_draw_person(next(name_indices), rng) for _ in range(num_people)]


def biography(person: Person, language: Language, seed: int) -> str:
    """Return a paragraph of six sentences that tells every attribute of a person once.

    The first sentence gives the full name. The order of the attributes, each sentence's template, and how later
    sentences mention the person are random. A pure function of its arguments.
    """
    rng = random.Random(f"biography/{language}/{seed}/{person.name.en}")
    tell = _english_sentence if language == "en" else _korean_sentence
    first, *others = rng.sample(ATTRIBUTES, len(ATTRIBUTES))
    sentences = [tell(person, first, "name", rng)]
    sentences += [tell(person, attribute, rng.choice(_LATER_MENTIONS), rng) for attribute in others]
    return " ".join(sentences)


def question(person: Person, attribute: str, language: Language) -> str:
    """Return a question for one attribute of a person, given by full name; KeyError if it is not in `ATTRIBUTES`."""
    questions = ENGLISH_QUESTIONS if language == "en" else KOREAN_QUESTIONS
    return questions[attribute].format(name=person.name.in_language(language))


def answer(person: Person, attribute: str, language: Language) -> str:
    """Return one attribute of a person as its biography words it; KeyError if it is not in `ATTRIBUTES`."""
    return _values(person)[attribute].in_language(language)


def resolve_particles(korean: str) -> str:
    """Replace each Korean particle that is written with both forms by the form that fits its place.

    The form depends on whether the syllable before it ends in a consonant: 은(는), 이(가), 을(를), 과(와), (으)로, and
    (이) as in (이)다. After ㄹ, (으)로 is 로 too.
    """
    return _PARTICLE.sub(_resolve_particle, korean)


def _resolve_particle(match: re.Match[str]) -> str:
    syllable, particle = match.groups()
    if not syllable or not _FIRST_SYLLABLE <= syllable <= _LAST_SYLLABLE:
        raise ValueError(
            f"a particle must follow a Hangul syllable: {match[0]!r} in {match.string!r}"
        )
    # In Unicode's order the final consonant of a syllable varies fastest, and no consonant is 0.
    final = (ord(syllable) - ord(_FIRST_SYLLABLE)) % _NUM_FINALS
    after_consonant, after_vowel = _FORMS_AFTER_CONSONANT_AND_VOWEL[particle]
    takes_vowel_form = final == 0 or (particle == "(으)로" and final == _RIEUL)
    return syllable + (after_vowel if takes_vowel_form else after_consonant)


def _permutation(size: int, rng: random.Random) -> Iterator[int]:
    """Yield the integers below `size` in random order; the cost depends only on how many are taken."""
    displaced: dict[int, int] = {}
    for position in range(size):
        chosen = rng.randrange(position, size)
        yield displaced.get(chosen, chosen)
        displaced[chosen] = displaced.get(position, position)


def _draw_person(name_index: int, rng: random.Random) -> Person:
    rest, last = divmod(name_index, len(LAST_NAMES))
    first, middle = divmod(rest, len(MIDDLE_NAMES))
    gender, first_name = _FIRST_NAMES[first]
    parts = (first_name, MIDDLE_NAMES[middle], LAST_NAMES[last])
    num_days = (_LAST_BIRTH_DATE - _FIRST_BIRTH_DATE).days + 1
    return Person(
        name=Translated(
            en=" ".join(part[0] for part in parts), ko=" ".join(part[1] for part in parts)
        ),
        gender=gender,
        birth_date=_FIRST_BIRTH_DATE + datetime.timedelta(days=rng.randrange(num_days)),
        birth_city=Translated(*rng.choice(CITIES)),
        university=Translated(*rng.choice(UNIVERSITIES)),
        major=Translated(*rng.choice(MAJORS)),
        employer=Translated(*rng.choice(EMPLOYERS)),
        work_city=Translated(*rng.choice(CITIES)),
    )


def _values(person: Person) -> dict[str, Translated]:
    date = person.birth_date
    birth_date = Translated(
        en=f"{ENGLISH_MONTHS[date.month - 1]} {date.day}, {date.year}",
        ko=f"{date.year}년 {date.month}월 {date.day}일",
    )
    return {attribute: getattr(person, attribute) for attribute in ATTRIBUTES} | {
        "birth_date": birth_date
    }


def _english_sentence(person: Person, attribute: str, mention: _Mention, rng: random.Random) -> str:
    """Return a sentence on one attribute; an omitted mention becomes a pronoun, since English needs a subject."""
    template = rng.choice(ENGLISH_TEMPLATES[attribute])
    their = _POSSESSIVE_PRONOUNS[person.gender]
    if mention == "name":
        subject, possessive = person.name.en, f"{person.name.en}'s"
    else:
        subject, possessive = _SUBJECT_PRONOUNS[person.gender], their
    value = answer(person, attribute, "en")
    sentence = template.format(subject=subject, possessive=possessive, their=their, value=value)
    return sentence[0].upper() + sentence[1:]


def _korean_sentence(person: Person, attribute: str, mention: _Mention, rng: random.Random) -> str:
    """Return a sentence on one attribute; an omitted mention leaves the person out wherever Korean allows it."""
    template = rng.choice(KOREAN_TEMPLATES[attribute])
    person_word = person.name.ko if mention == "name" else "그"
    sentence = template.format(
        subject="" if mention == "omitted" else f"{person_word}은(는) ",
        possessive="" if mention == "omitted" else f"{person_word}의 ",
        clause_subject=f"{person_word}이(가) ",
        value=answer(person, attribute, "ko"),
    )
    return resolve_particles(sentence)
