import dataclasses
import datetime
import re
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.research.biography.people import (
    ATTRIBUTES,
    NUM_NAMES,
    Language,
    Person,
    answer,
    biography,
    generate_people,
    question,
    resolve_particles,
)

LANGUAGES: tuple[Language, ...] = get_args(Language)
PEOPLE = generate_people(2000, seed=0)

seeds = st.integers(-(2**63), 2**63)
people = st.sampled_from(PEOPLE)
languages = st.sampled_from(LANGUAGES)


@given(st.integers(0, 50), st.integers(0, 50), seeds, seeds)
def test_people_are_drawn_by_the_seed_and_a_longer_list_begins_with_the_shorter_one(
    num_people: int, num_others: int, seed: int, other_seed: int
) -> None:
    shorter = generate_people(num_people, seed)
    assert len(shorter) == num_people
    assert generate_people(num_people + num_others, seed)[:num_people] == shorter
    assert (generate_people(5, seed) == generate_people(5, other_seed)) == (seed == other_seed)


def test_names_are_many_and_distinct_in_each_language() -> None:
    assert NUM_NAMES >= 400_000
    for language in LANGUAGES:
        assert len({person.name.in_language(language) for person in PEOPLE}) == len(PEOPLE)
    for num_people in (-1, NUM_NAMES + 1):
        with pytest.raises(ValueError, match="num_people"):
            generate_people(num_people, seed=0)


@given(people, languages, seeds)
def test_a_biography_tells_every_answer_in_six_whole_sentences_of_which_the_first_names_the_person(
    person: Person, language: Language, seed: int
) -> None:
    told = biography(person, language, seed)
    assert told == biography(person, language, seed)
    assert all(answer(person, attribute, language) in told for attribute in ATTRIBUTES)
    sentences = told.split(". ")
    assert told.endswith(".") and "\n" not in told and len(sentences) == len(ATTRIBUTES)
    assert person.name.in_language(language) in sentences[0]
    assert not re.search(r"[{}()]|  |^ | $| [.,]", told), (
        "a placeholder, a choice of particles or a stray space"
    )
    if language == "en":
        assert all(sentence[0].isupper() for sentence in sentences)
    else:
        assert not re.search(r"[A-Za-z]", told)


@given(people, st.sampled_from(ATTRIBUTES), languages)
def test_a_question_names_the_person_and_does_not_give_the_answer_away(
    person: Person, attribute: str, language: Language
) -> None:
    asked = question(person, attribute, language)
    assert person.name.in_language(language) in asked and asked.endswith("?")
    assert answer(person, attribute, language) not in asked


def test_an_answer_is_the_value_of_its_attribute_and_a_date_is_worded_as_each_language_writes_dates() -> (
    None
):
    person = dataclasses.replace(PEOPLE[0], birth_date=datetime.date(1987, 3, 12))
    for language, date in zip(LANGUAGES, ("March 12, 1987", "1987년 3월 12일"), strict=True):
        for attribute in ATTRIBUTES:
            value = (
                date
                if attribute == "birth_date"
                else getattr(person, attribute).in_language(language)
            )
            assert answer(person, attribute, language) == value


@pytest.mark.parametrize(
    ("choice", "resolved"),
    [
        ("보스턴은(는)", "보스턴은"),
        ("제노바이(가)", "제노바가"),
        ("대학교을(를)", "대학교를"),
        ("로마과(와)", "로마와"),
        ("방콕(으)로", "방콕으로"),
        ("브리스틀(으)로", "브리스틀로"),
        ("쾰른(이)다", "쾰른이다"),
        ("마닐라(이)다", "마닐라다"),
        ("그은(는) 로잔을(를)", "그는 로잔을"),
        ("조사가 없는 글", "조사가 없는 글"),
    ],
)
def test_a_particle_takes_the_form_that_the_syllable_before_it_calls_for(
    choice: str, resolved: str
) -> None:
    assert resolve_particles(choice) == resolved
