import dataclasses
import datetime
import re
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.biography import people as text
from scripts.biography.people import (
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
WORD_LISTS = (
    text.FEMININE_NAMES + text.MASCULINE_NAMES,
    text.MIDDLE_NAMES,
    text.LAST_NAMES,
    text.CITIES,
    text.UNIVERSITIES,
    text.MAJORS,
    text.EMPLOYERS,
)
PEOPLE = generate_people(2000, seed=0)

seeds = st.integers(-(2**63), 2**63)
people = st.sampled_from(PEOPLE)
languages = st.sampled_from(LANGUAGES)
attributes = st.sampled_from(ATTRIBUTES)


@given(st.integers(0, 50), st.integers(0, 50), seeds)
def test_a_longer_list_of_people_begins_with_the_shorter_one(num_people: int, num_others: int, seed: int) -> None:
    shorter = generate_people(num_people, seed)
    assert len(shorter) == num_people
    assert generate_people(num_people + num_others, seed)[:num_people] == shorter


@given(seeds, seeds)
def test_other_seeds_draw_other_people(seed: int, other_seed: int) -> None:
    assert (generate_people(5, seed) == generate_people(5, other_seed)) == (seed == other_seed)


@pytest.mark.parametrize("language", LANGUAGES)
def test_names_are_distinct_in_each_language(language: Language) -> None:
    assert len({person.name.in_language(language) for person in PEOPLE}) == len(PEOPLE)


def test_there_are_at_least_400_000_names() -> None:
    assert NUM_NAMES >= 400_000


@pytest.mark.parametrize("num_people", [-1, NUM_NAMES + 1])
def test_more_people_than_names_or_fewer_than_none_are_refused(num_people: int) -> None:
    with pytest.raises(ValueError, match="num_people"):
        generate_people(num_people, seed=0)


@pytest.mark.parametrize("language_index", [0, 1])
@pytest.mark.parametrize("words", WORD_LISTS)
def test_no_word_begins_another_of_its_list(words: tuple[tuple[str, str], ...], language_index: int) -> None:
    in_order = sorted(pair[language_index] for pair in words)
    assert all(in_order)
    assert not [word for word, following in pairwise(in_order) if following.startswith(word)]


@given(people, languages, seeds)
def test_a_biography_is_a_pure_function_of_its_arguments(person: Person, language: Language, seed: int) -> None:
    assert biography(person, language, seed) == biography(person, language, seed)


@given(people, languages, seeds)
def test_a_biography_holds_every_answer_verbatim(person: Person, language: Language, seed: int) -> None:
    told = biography(person, language, seed)
    assert all(answer(person, attribute, language) in told for attribute in ATTRIBUTES)


@given(people, languages, seeds)
def test_a_biography_is_six_sentences_of_which_the_first_names_the_person(
    person: Person, language: Language, seed: int
) -> None:
    told = biography(person, language, seed)
    sentences = told.split(". ")
    assert told.endswith(".")
    assert "\n" not in told
    assert len(sentences) == len(ATTRIBUTES)
    assert person.name.in_language(language) in sentences[0]


@given(people, languages, seeds)
def test_a_biography_leaves_no_placeholder_particle_choice_or_stray_space(
    person: Person, language: Language, seed: int
) -> None:
    assert not re.search(r"[{}()]|  |^ | $| [.,]", biography(person, language, seed))


@given(people, seeds)
def test_an_english_biography_starts_every_sentence_with_a_capital_letter(person: Person, seed: int) -> None:
    assert all(sentence[0].isupper() for sentence in biography(person, "en", seed).split(". "))


@given(people, seeds)
def test_a_korean_biography_has_no_latin_letters(person: Person, seed: int) -> None:
    assert not re.search(r"[A-Za-z]", biography(person, "ko", seed))


@pytest.mark.parametrize("language", LANGUAGES)
def test_one_person_has_many_biographies(language: Language) -> None:
    assert len({biography(PEOPLE[0], language, seed) for seed in range(200)}) == 200


@pytest.mark.parametrize("templates", [text.ENGLISH_TEMPLATES, text.KOREAN_TEMPLATES])
@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_every_attribute_has_eight_templates_that_hold_the_value_and_mention_the_person_once(
    templates: dict[str, tuple[str, ...]], attribute: str
) -> None:
    assert len(set(templates[attribute])) >= 8
    for template in templates[attribute]:
        assert len(re.findall(r"\{value\}", template)) == 1
        assert len(re.findall(r"\{(subject|possessive|clause_subject)\}", template)) == 1


@given(people, attributes, languages)
def test_a_question_names_the_person_and_does_not_give_the_answer_away(
    person: Person, attribute: str, language: Language
) -> None:
    asked = question(person, attribute, language)
    assert person.name.in_language(language) in asked
    assert asked.endswith("?")
    assert answer(person, attribute, language) not in asked


def test_a_birth_date_is_worded_as_each_language_writes_dates() -> None:
    person = dataclasses.replace(PEOPLE[0], birth_date=datetime.date(1987, 3, 12))
    assert answer(person, "birth_date", "en") == "March 12, 1987"
    assert answer(person, "birth_date", "ko") == "1987년 3월 12일"


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_answer_but_the_birth_date_is_the_value_of_that_attribute(language: Language) -> None:
    person = PEOPLE[0]
    values = (person.birth_city, person.university, person.major, person.employer, person.work_city)
    told = [answer(person, attribute, language) for attribute in ATTRIBUTES if attribute != "birth_date"]
    assert told == [value.in_language(language) for value in values]


def test_an_unknown_attribute_is_refused() -> None:
    with pytest.raises(KeyError):
        question(PEOPLE[0], "height", "en")
    with pytest.raises(KeyError):
        answer(PEOPLE[0], "height", "ko")


@pytest.mark.parametrize(
    ("choice", "resolved"),
    [
        ("보스턴은(는)", "보스턴은"),
        ("파리은(는)", "파리는"),
        ("경제학이(가)", "경제학이"),
        ("제노바이(가)", "제노바가"),
        ("법학을(를)", "법학을"),
        ("대학교을(를)", "대학교를"),
        ("런던과(와)", "런던과"),
        ("로마과(와)", "로마와"),
        ("방콕(으)로", "방콕으로"),
        ("오사카(으)로", "오사카로"),
        ("쾰른(이)다", "쾰른이다"),
        ("마닐라(이)다", "마닐라다"),
        ("밴터풀은(는)", "밴터풀은"),
        ("브리스틀(으)로", "브리스틀로"),
        ("그은(는) 로잔을(를)", "그는 로잔을"),
        ("조사가 없는 글", "조사가 없는 글"),
    ],
)
def test_a_particle_takes_the_form_that_the_syllable_before_it_calls_for(choice: str, resolved: str) -> None:
    assert resolve_particles(choice) == resolved


@pytest.mark.parametrize("choice", ["은(는)", "Boston은(는)", "보스턴 을(를)", "1987(으)로"])
def test_a_particle_after_no_hangul_syllable_is_refused(choice: str) -> None:
    with pytest.raises(ValueError, match="Hangul"):
        resolve_particles(choice)
