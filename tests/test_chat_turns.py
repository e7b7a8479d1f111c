"""What was said, found in the ids of a prompt, against what is found where the messages are known."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from scale_cli.chat_turns import ChatTurns, answer_end, read_prompt, unspecial_marks
from scale_cli.config.schema import ModelConfig
from scale_cli.data.conversations import conversation_ids, said_tokens
from scale_cli.data.encoding import prompt_ids
from scale_cli.upscale.base_tokenizer import load_tokenizer

EACH = "{% for m in messages %}"
END = "{% endfor %}"
ASKS = "{% if add_generation_prompt %}"
TEMPLATES = {
    "ChatML, a system message of its own": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are SmolLM.<|im_end|>\n"
        f"{{% endif %}}{EACH}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}<|im_end|>\n{END}"
        f"{ASKS}<|im_start|>assistant\n{{% endif %}}"
    ),
    "Llama 3": (
        f"{EACH}<|start_header_id|>{{{{ m.role }}}}<|end_header_id|>\n\n{{{{ m.content | trim }}}}"
        f"<|eot_id|>{END}{ASKS}<|start_header_id|>assistant<|end_header_id|>\n\n{{% endif %}}"
    ),
    "Mistral": (
        f"{EACH}{{% if m.role == 'assistant' %}} {{{{ m.content }}}}</s>{{% else %}}"
        f"[INST] {{{{ m.content }}}} [/INST]{{% endif %}}{END}"
    ),
    "no special token": (
        f"{EACH}{{{{ m.role }}}}: {{{{ m.content }}}}\n{END}{ASKS}assistant:{{% endif %}}"
    ),
}
QUESTION = {"role": "user", "content": "한국의 수도는 어디입니까?"}
ANSWER = {"role": "assistant", "content": "Seoul, as you know:\nit is 서울."}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [QUESTION],
    [QUESTION, ANSWER, {"role": "user", "content": " And of Japan? "}],
    [QUESTION, ANSWER, QUESTION, ANSWER, {"role": "user", "content": "<b> & 네"}],
    [{"role": "system", "content": "Answer in Korean."}, QUESTION],
    [{"role": "system", "content": "Asked 한국의 수도는 어디입니까? say Seoul."}, QUESTION],
    [{"role": "user", "content": "user"}],
]


@pytest.fixture
def tokenizer(shared_data: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(ModelConfig(base=str(shared_data / "ckpt-eltec" / "hf")))


@pytest.mark.parametrize("name", TEMPLATES)
def test_words_and_tokens_are_those_of_the_messages(
    tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    tokenizer.chat_template = TEMPLATES[name]
    turns = ChatTurns.of(tokenizer)
    assert turns is not None
    for messages in CONVERSATIONS:
        if name == "Mistral" and messages[0]["role"] == "system":
            continue  # its system message is one of the user's
        ids = conversation_ids(tokenizer, messages)
        words, said = read_prompt(tokenizer, turns, ids)
        asked = [turn["content"] for turn in messages if turn["role"] == "user"]
        assert words == "\n".join(content.strip() for content in asked)
        assert said == said_tokens(tokenizer, messages)


@pytest.mark.parametrize("roles", ["uu", "usu", "au", "ua", "utu"])
def test_the_words_of_a_conversation_without_turns_are_those_of_its_messages(
    tokenizer: PreTrainedTokenizerBase, roles: str
) -> None:
    tokenizer.chat_template = TEMPLATES["ChatML, a system message of its own"]
    names = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    said = [f"word {number}" for number in range(len(roles))]
    messages = [
        {"role": names[role], "content": words} for role, words in zip(roles, said, strict=True)
    ]
    ids = conversation_ids(tokenizer, messages)
    judged = [
        token for token, counts in zip(ids, said_tokens(tokenizer, messages), strict=True) if counts
    ]
    expected = [words for role, words in zip(roles, said, strict=True) if role != "s"]
    assert "".join(str(tokenizer.decode(judged)).split()) == "".join(expected).replace(" ", "")


@pytest.mark.parametrize("name", TEMPLATES)
def test_of_a_prompt_that_is_no_chat_everything_counts(
    tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    tokenizer.chat_template = TEMPLATES[name]
    ids = prompt_ids(tokenizer, "한국의 수도 is Seoul")
    read = read_prompt(tokenizer, ChatTurns.of(tokenizer), ids)
    assert read == ("한국의 수도 is Seoul", [True] * len(ids))


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{{ raise_exception('no') }}",
        "{{ messages[0].content }}",
        "{% for m in messages %}{{ m.content }}\n{% endfor %}",
    ],
)
def test_a_template_without_marks_has_no_turns(
    tokenizer: PreTrainedTokenizerBase, template: str | None
) -> None:
    tokenizer.chat_template = template
    assert ChatTurns.of(tokenizer) is None


MARKS = {
    "ChatML, a system message of its own": ["<|im_end|>", "<|im_start|>"],
    "Llama 3": ["<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
    "Mistral": ["</s>", "[INST]", "[/INST]"],
    "no special token": [],
}
# In the templates too, but the first is no mark, and the others stand in no turn.
OTHERS = ["assistant", "\n\n", "<think>"]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_mark_after_an_answer_ends_it_whether_or_not_the_tokenizer_calls_it_special(
    tokenizer: PreTrainedTokenizerBase, name: str, *, special: bool
) -> None:
    tokenizer.chat_template = TEMPLATES[name] + "{# <think> #}"
    added = [AddedToken(mark, special=special, normalized=False) for mark in MARKS[name]]
    tokenizer.add_tokens([*added, *(AddedToken(other, special=False) for other in OTHERS)])
    known = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    assert unspecial_marks(tokenizer) == {*MARKS[name]} - known
    ends = [tokenizer.get_added_vocab()[mark] for mark in MARKS[name][:1]]
    assert answer_end(tokenizer) == (ends[0] if ends else None)


def test_a_mark_of_a_system_message_or_of_a_tools_answer_is_a_mark(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizer.chat_template = (
        f"{EACH}<|{{{{ m.role }}}}|>{{{{ m.content }}}}{{% if m.role == 'tool' %}}<|told|>{{% endif %}}"
        f"{END}{ASKS}<|assistant|>{{% endif %}}"
    )
    marks = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|told|>"]
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in marks])
    assert unspecial_marks(tokenizer) == {*marks}
    # Nothing else stands between an answer and the next question.
    assert answer_end(tokenizer) == tokenizer.convert_tokens_to_ids("<|user|>")
