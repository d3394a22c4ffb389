# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of each kind, made from a few lines of ASCII.

The classes are the ones that the real repositories name, so that special tokens, normalisation and padding are theirs;
only the vocabulary is small.
"""

import json
import re
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, List

__all__ = ["KINDS", "TEXT", "write_tokenizer"]

# Written for this purpose. It holds every printable ASCII character, because a tiny vocabulary should still not meet an
# unknown one, and the common short words that keep test sentences short.
TEXT = [
    "This is the first line of a small text, and it says that a small text is enough.",
    "Who asks where the answer is, and who is there to hear it? The one who is in the other part of the house.",
    "A test of the words that are in a test: this and that, here and there, now and then, yes and no.",
    "She has a dog and a cat; he is cute and they are great, said the man who was in the city.",
    "It was in Paris that they met, and in New York that they worked, as it was said in 2016 and in 2020.",
    "The first sentence is about health, the second about science, and the other about politics and the public.",
    "We will check this line with the model, and the model will give the same output for the same input.",
    "A prompt, a choice, a line and a part: these are the things that go into the model, one after the other.",
    "Hello world, hello there! My name is on the list; what is on the other side of it, and who made it?",
    "They need to generate text: to write, to think, to welcome among other things what is not known.",
    "Justin and Jessica, just in time, saw timber by the lake; Michael, Tim and a parent were in the hood, said Biel.",
    "0 1 2 3 4 5 6 7 8 9 + - * / = < > ( ) [ ] { } . , ; : ! ? ' \" ` ~ @ # $ % ^ & | \\ _",
    "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z a b c d e f g h i j k l m n o p q r s t u v w x y z",
]

_WHISPER_TASKS = ["translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps"]


def _words() -> List[str]:
    """Return the text's words without punctuation, each once, in the order of their first use."""
    return list(dict.fromkeys(re.findall("[A-Za-z]{2,}", " ".join(TEXT))))


def _characters() -> List[str]:
    return sorted(set("".join(TEXT)) - {" "})


def _byte_level(specials: List[str], size: int, folder: Path) -> Dict[str, str]:
    """Train byte-pair merges; return the files by the names of the arguments that take them."""
    import tokenizers

    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(TEXT, vocab_size=size, min_frequency=1, special_tokens=specials, show_progress=False)
    vocab, merges = trained.save_model(str(folder))
    return {"vocab_file": vocab, "merges_file": merges}


def _word_pieces(specials: List[str], size: int, folder: Path, lowercase: bool = True) -> Dict[str, str]:
    # Listed, not trained: the trainer of `tokenizers` 0.13 breaks ties by chance, and two builds should be the same.
    fold = str.lower if lowercase else str
    characters = list(dict.fromkeys(fold(character) for character in _characters()))
    inner = ["##" + character for character in characters if character.isalnum()]
    pieces = list(dict.fromkeys([*specials, *characters, *inner, *map(fold, _words())]))
    path = folder / "vocab.txt"
    path.write_text("".join(piece + "\n" for piece in pieces[:size]), encoding="utf-8")
    return {"vocab_file": str(path)}


def _bert(name: str, specials: List[str], lowercase: bool = True) -> Callable[[Path, int], Any]:
    def make(folder: Path, size: int) -> Any:
        import transformers

        files = _word_pieces(specials, size, folder, lowercase)
        return getattr(transformers, name)(**files, do_lower_case=lowercase)

    return make


def _bpe(name: str, specials: List[str]) -> Callable[[Path, int], Any]:
    def make(folder: Path, size: int) -> Any:
        import transformers

        return getattr(transformers, name)(**_byte_level(specials, size, folder))

    return make


def _whisper(folder: Path, size: int) -> Any:
    import transformers
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    tokenizer = transformers.WhisperTokenizer(**_byte_level(["<|endoftext|>"], size, folder))
    # Its prefix is found by counting from the end, so all languages have to be there, in this order.
    added = ["startoftranscript", *LANGUAGES, *_WHISPER_TASKS]
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{name}|>" for name in added]})
    return tokenizer


def _unigram(folder: Path, size: int) -> Any:
    """Return a T5 tokenizer; its slow twin needs a SentencePiece file and is not offered."""
    import tokenizers
    import transformers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    words = ["\u2581" + word for word in _words()]
    characters = ["\u2581", *_characters()]
    # Any whole word costs less than two characters, and so is preferred.
    pieces = [(piece, -8.0) for piece in words] + [(piece, -5.0) for piece in characters]
    specials = [(piece, 0.0) for piece in ("<pad>", "</s>", "<unk>")]
    trained = tokenizers.Tokenizer(models.Unigram((specials + pieces)[:size], unk_id=2))
    trained.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()])
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.decoder = decoders.Metaspace()
    trained.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return transformers.T5TokenizerFast(tokenizer_object=trained)


def _ctc(folder: Path, size: int) -> Any:
    import transformers

    symbols = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ'"]
    path = folder / "vocab.json"
    path.write_text(json.dumps({symbol: index for index, symbol in enumerate(symbols)}), encoding="utf-8")
    return transformers.Wav2Vec2CTCTokenizer(str(path))


_BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]

KINDS: Dict[str, Callable[[Path, int], Any]] = {
    "bart": _bpe("BartTokenizerFast", _ROBERTA),
    "bert": _bert("BertTokenizerFast", _BERT),
    "bert-cased": _bert("BertTokenizerFast", _BERT, lowercase=False),
    "ctc": _ctc,
    "deberta": _bpe("DebertaTokenizerFast", ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]),
    "distilbert": _bert("DistilBertTokenizerFast", _BERT),
    "distilbert-cased": _bert("DistilBertTokenizerFast", _BERT, lowercase=False),
    "gpt2": _bpe("GPT2TokenizerFast", ["<|endoftext|>"]),
    "lxmert": _bert("LxmertTokenizerFast", _BERT),
    "mpnet": _bert("MPNetTokenizerFast", ["<s>", "<pad>", "</s>", "[UNK]", "<mask>"]),
    "roberta": _bpe("RobertaTokenizerFast", _ROBERTA),
    "t5": _unigram,
    "whisper": _whisper,
}
"""What makes a tokenizer of a kind from a scratch folder and a vocabulary size."""


def write_tokenizer(kind: str, size: int, folder: Path) -> Any:
    """Make a tokenizer and save it into `folder`.

    Args:
        kind: a key of `KINDS`.
        size: how many entries the vocabulary may have (the text yields about 600; `ctc` ignores it).
        folder: where its files go.

    Returns:
        the tokenizer.
    """
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = KINDS[kind](Path(scratch), size)
        tokenizer.save_pretrained(str(folder))
    return tokenizer
