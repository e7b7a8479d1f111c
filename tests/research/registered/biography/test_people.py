import re
from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from scripts.research.biography.people import (
    ATTRIBUTES,
    Language,
    Person,
    answer,
    biography,
    generate_people,
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
