"""One chat template, rendered within limits of time and size.

Knows tokenizers, never models.
"""

import copy
import ctypes
import json
import threading
import time
from contextlib import contextmanager

from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerBase

TEXT = 1 << 26  # characters of the longest rendered conversation
SPANS = "a token spans the border of what is learned"
TEMPLATE_SECONDS = 20  # of one call of a chat template, which takes milliseconds
RESERVED = {"conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message"}
RESERVED |= {"tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"}
RESERVED |= {"messages", "return_assistant_tokens_mask"}  # what is no business of a template's own arguments


class TemplateHangs(BaseException):
    """Past every `except Exception` of whatever a template calls."""


class TimeLimit:
    """Ends what takes longer than TEMPLATE_SECONDS `within()` it, by TemplateHangs, if it runs any Python.

    A thread counts the time of all others, only while they are within; so neither signals nor the main thread are
    needed, a process that was stopped meanwhile loses nothing, and outside nothing is ever raised.
    """

    def __init__(self):
        self.left, self.lock, self.busy, self.counter = {}, threading.Lock(), threading.Event(), None

    @contextmanager
    def within(self):
        thread = threading.get_ident()
        with self.lock:
            self.left[thread] = TEMPLATE_SECONDS
            self.busy.set()
            if self.counter is None or not self.counter.is_alive():  # the first time, or in a fork
                self.counter = threading.Thread(target=self.count, daemon=True)
                self.counter.start()
        try:
            yield
        finally:
            with self.lock:
                self.left.pop(thread, None)

    def count(self):
        while self.busy.wait():
            time.sleep(0.1)
            with self.lock:
                self.left = {thread: seconds - 0.1 for thread, seconds in self.left.items()}
                for thread in [thread for thread, seconds in self.left.items() if seconds <= 0]:
                    del self.left[thread]
                    hangs = ctypes.py_object(TemplateHangs)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), hangs)
                if not self.left:
                    self.busy.clear()


LIMIT = TimeLimit()


class Skip(Exception):
    """Why a conversation, or one turn of it, is not learned."""


def read_arguments(given: list[str] | None) -> dict:
    """NAME=VALUE as a template takes them: a value is JSON where it can be, else text. ValueError: anything else."""
    words, out = {"true": True, "false": False, "null": None, "none": None}, {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier() or name in RESERVED:
            raise ValueError(f"holds {text[:60]!r}; NAME=VALUE of an argument of the chat template is wanted")
        try:
            out[name] = words[value.lower()] if value.lower() in words else json.loads(value)
        except (ValueError, RecursionError):
            out[name] = value
    return out


def check_template(tokenizer) -> None:
    """ValueError: the target brings none."""
    usual = getattr(type(tokenizer), "apply_chat_template", None) is PreTrainedTokenizerBase.apply_chat_template
    if tokenizer.chat_template is None and usual:  # else by code of its own
        raise ValueError(
            f"{tokenizer.name_or_path or 'the tokenizer'} brings no chat template (some targets ship code instead); "
            "put a chat_template.jinja beside its config.json, or name one by --chat-template FILE, or a running vLLM "
            "by --render URL"
        )


def render(tokenizer, messages: list[dict], tools, arguments: dict, add_generation_prompt: bool = False) -> str:
    """The text of a conversation. Skip: the template fails; TemplateHangs: it does not end."""
    how = {"tools": tools, "tokenize": False, "add_generation_prompt": add_generation_prompt}
    try:
        with LIMIT.within():
            text = tokenizer.apply_chat_template(messages, **how, **arguments)
        if len(text) > TEXT:
            raise Skip(f"the chat template makes more than {TEXT:,} characters")
        text.encode()  # JSON can hold half a surrogate pair
        return text
    except TemplateHangs:
        name = tokenizer.name_or_path or "the tokenizer"
        raise TemplateHangs(f"the chat template of {name} takes more than {TEMPLATE_SECONDS:g} s") from None
    except Skip:
        raise
    except UnicodeEncodeError:
        raise Skip("text that is not Unicode") from None
    except Exception as error:  # templates raise whatever they meet
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:100].encode(errors="replace").decode()
        raise Skip(f"the chat template fails ({reason})") from None


def bare_backend(tokenizer) -> Tokenizer | None:
    """A copy of a fast tokenizer's own that encodes texts whole, with exact offsets; threads may share it. None: it is
    slow."""
    if not tokenizer.is_fast:
        return None
    backend = copy.deepcopy(tokenizer.backend_tokenizer)
    backend.no_truncation()
    backend.no_padding()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)  # offsets must not hide blanks
    return backend
