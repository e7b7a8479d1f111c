from scripts.research.biography.config import BiographyConfig
from scripts.research.biography.people import ATTRIBUTES, answer, generate_people, question
from scripts.research.biography.tasks import write_curriculum


def test_every_question_is_asked_once_as_it_was_worded_and_task_1_is_about_people_of_whom_nothing_was_told(
    small: BiographyConfig,
) -> None:
    curriculum, people = write_curriculum(small), generate_people(9, small.seed)
    for asked, persons in ((curriculum.task_0, people[:4]), (curriculum.task_1, people[6:])):
        texts = curriculum.tokenizer.batch_decode(
            curriculum.sequences(asked), skip_special_tokens=True
        )
        wanted = [
            f"{question(p, a, 'en')} {answer(p, a, 'en')}" for p in persons for a in ATTRIBUTES
        ]
        assert texts == wanted
    told = " ".join(curriculum.tokenizer.batch_decode(curriculum.biographies))
    assert all(person.name.en in told for person in people[:6])
    assert not any(person.name.en in told for person in people[6:])
