# SPDX-License-Identifier: Apache-2.0
"""The model repositories that optimum-graphcore's tests name, as architectures of a few layers with random weights.

Layer counts go with `layouts.py` or, for the `hf-internal-testing` and `sshleifer` models, with the layouts that the
tests write beside the name. Everything else is small. Dropout stays at each class's default: the tests call `eval()`.
"""

import zlib
from pathlib import Path
from typing import Any, Dict, NamedTuple, Optional

from .vocabulary import write_tokenizer

__all__ = ["MODELS", "TinyModel", "write_model", "write_whisper_generation"]

# With this many entries the byte-level tokenizers cut the two sentences whose length the generation tests state into 29
# and 9 tokens.
_VOCABULARY = 480


class TinyModel(NamedTuple):
    """One repository.

    Attributes:
        weights: the class whose random weights are saved; its `config_class` makes the configuration.
        settings: what the configuration gets beside its defaults.
        tokenizer: a kind of `vocabulary.KINDS`, or None.
        extractor: the class of the feature extractor or image processor, or None.
        extractor_settings: its arguments.
        endless: the end token is never the likeliest, so that what ends a generation is its limit. A BART with random
            weights says it at once: it starts with that token, and its head is its embedding.
    """

    weights: str
    settings: Dict[str, Any]
    tokenizer: Optional[str] = None
    extractor: Optional[str] = None
    extractor_settings: Optional[Dict[str, Any]] = None
    endless: bool = False


def _encoder(layers: int = 2, **more: Any) -> Dict[str, Any]:
    return dict(
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=512,
        **more,
    )


def _distilbert(layers: int, **more: Any) -> Dict[str, Any]:
    return dict(dim=32, n_layers=layers, n_heads=2, hidden_dim=64, max_position_embeddings=512, **more)


def _bart(layers: int, positions: int = 512) -> Dict[str, Any]:
    return dict(
        d_model=32,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=positions,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=2,
    )


def _gpt2(layers: int) -> Dict[str, Any]:
    # More entries than the tokenizer has: the tests forbid and expect ids up to 873.
    return dict(vocab_size=1024, n_embd=32, n_layer=layers, n_head=2, n_positions=512, bos_token_id=0, eos_token_id=0)


def _t5(layers: int, **more: Any) -> Dict[str, Any]:
    return dict(
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=layers,
        num_decoder_layers=layers,
        num_heads=2,
        decoder_start_token_id=0,
        **more,
    )


def _speech(layers: int, **more: Any) -> Dict[str, Any]:
    # Frames of 10 * 8 * 4 = 320 samples, as in the real models, from three convolutions in place of seven.
    return dict(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=64,
        conv_dim=[32, 32, 32],
        conv_kernel=[10, 8, 4],
        conv_stride=[10, 8, 4],
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        **more,
    )


def _whisper(layers: int, positions: int) -> Dict[str, Any]:
    return dict(
        d_model=32,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=positions,
        max_target_positions=64,
    )


def _vit(layers: int, image: int) -> Dict[str, Any]:
    return dict(
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=image,
        patch_size=image // 4,
    )


def _labels(*names: str) -> Dict[str, Any]:
    return dict(id2label=dict(enumerate(names)), label2id={name: index for index, name in enumerate(names)})


_ENTITIES = _labels("O", "B-MISC", "I-MISC", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC")
_SPEECH = ("Wav2Vec2FeatureExtractor", dict(do_normalize=True, return_attention_mask=False))
_MASKED_SPEECH = ("Wav2Vec2FeatureExtractor", dict(do_normalize=True, return_attention_mask=True))

MODELS: Dict[str, TinyModel] = {
    # One for each architecture that optimum-graphcore supports.
    "facebook/bart-base": TinyModel("BartModel", _bart(2), "bart"),
    "bert-base-uncased": TinyModel("BertForPreTraining", _encoder(), "bert"),
    "facebook/convnext-base-224": TinyModel(
        "ConvNextForImageClassification",
        dict(hidden_sizes=[8, 16, 32, 32], depths=[1, 1, 1, 1], image_size=32),
        extractor="ConvNextFeatureExtractor",
        extractor_settings=dict(size=32),
    ),
    "microsoft/deberta-base": TinyModel(
        "DebertaModel",
        _encoder(relative_attention=True, max_relative_positions=-1, pos_att_type="c2p|p2c", pad_token_id=0),
        "deberta",
    ),
    "distilbert-base-uncased": TinyModel("DistilBertForMaskedLM", _distilbert(2), "distilbert"),
    "gpt2": TinyModel("GPT2LMHeadModel", _gpt2(2), "gpt2"),
    "Graphcore/groupbert-base-uncased": TinyModel("GroupBertForPreTraining", _encoder(), "bert"),
    "facebook/hubert-base-ls960": TinyModel("HubertModel", _speech(2), "ctc", *_SPEECH),
    "unc-nlp/lxmert-base-uncased": TinyModel(
        "LxmertForPreTraining",
        dict(
            hidden_size=32,
            num_attention_heads=2,
            intermediate_size=64,
            l_layers=2,
            r_layers=2,
            x_layers=2,
            num_qa_labels=12,
            num_object_labels=16,
            num_attr_labels=8,
        ),
        "lxmert",
    ),
    "roberta-base": TinyModel("RobertaForMaskedLM", _encoder(pad_token_id=1, type_vocab_size=1), "roberta"),
    "t5-small": TinyModel("T5ForConditionalGeneration", _t5(2), "t5"),
    "google/mt5-small": TinyModel(
        "MT5ForConditionalGeneration",
        _t5(2, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        "t5",
    ),
    "sentence-transformers/all-mpnet-base-v2": TinyModel("MPNetForMaskedLM", _encoder(), "mpnet"),
    "sentence-transformers/sentence-t5-base": TinyModel("T5EncoderModel", _t5(2), "t5"),
    "google/vit-base-patch16-224-in21k": TinyModel(
        "ViTModel", _vit(2, 32), extractor="ViTFeatureExtractor", extractor_settings=dict(size=32)
    ),
    "facebook/wav2vec2-base": TinyModel(
        "Wav2Vec2ForPreTraining",
        _speech(2, codevector_dim=16, proj_codevector_dim=16, num_codevectors_per_group=8, num_negatives=4),
        "ctc",
        *_SPEECH,
    ),
    "openai/whisper-tiny": TinyModel(
        "WhisperForConditionalGeneration",
        _whisper(2, 50),
        "whisper",
        "WhisperFeatureExtractor",
        dict(feature_size=80, chunk_length=1),
    ),
    # The small models that single tests name.
    "hf-internal-testing/tiny-random-bart": TinyModel("BartForConditionalGeneration", _bart(2, 100), "bart"),
    "sshleifer/bart-tiny-random": TinyModel("BartForConditionalGeneration", _bart(2, 100), "bart", endless=True),
    "hf-internal-testing/tiny-random-distilbert": TinyModel(
        "DistilBertForSequenceClassification", _distilbert(5), "distilbert"
    ),
    "hf-internal-testing/tiny-random-gpt2": TinyModel("GPT2LMHeadModel", _gpt2(5), "gpt2"),
    "distilgpt2": TinyModel("GPT2LMHeadModel", _gpt2(2), "gpt2"),
    "hf-internal-testing/tiny-random-t5": TinyModel("T5ForConditionalGeneration", _t5(2), "t5"),
    "hf-internal-testing/tiny-random-vit": TinyModel(
        "ViTForImageClassification", _vit(5, 32), extractor="ViTFeatureExtractor", extractor_settings=dict(size=32)
    ),
    "hf-internal-testing/tiny-random-wav2vec2": TinyModel("Wav2Vec2ForCTC", _speech(4), "ctc", *_MASKED_SPEECH),
    "patrickvonplaten/tiny-wav2vec2-no-tokenizer": TinyModel("Wav2Vec2ForCTC", _speech(4), None, *_SPEECH),
    "facebook/wav2vec2-base-960h": TinyModel("Wav2Vec2ForCTC", _speech(2), "ctc", *_SPEECH),
    "hf-internal-testing/tiny-random-WhisperForConditionalGeneration": TinyModel(
        "WhisperForConditionalGeneration",
        _whisper(2, 30),
        "whisper",
        "WhisperFeatureExtractor",
        dict(feature_size=80, chunk_length=1),
    ),
    "hf-internal-testing/tiny-bert-for-token-classification": TinyModel(
        "BertForTokenClassification", _encoder(**_ENTITIES), "bert"
    ),
    "sshleifer/tiny-dbmdz-bert-large-cased-finetuned-conll03-english": TinyModel(
        "BertForTokenClassification", _encoder(**_ENTITIES), "bert-cased"
    ),
    "sshleifer/tiny-distilbert-base-cased-distilled-squad": TinyModel(
        "DistilBertForQuestionAnswering", _distilbert(2), "distilbert-cased"
    ),
    "sshleifer/tiny-distilroberta-base": TinyModel(
        "RobertaForMaskedLM", _encoder(pad_token_id=1, type_vocab_size=1), "roberta"
    ),
}


def _class(name: str) -> Any:
    import transformers

    if name.startswith("GroupBert"):
        # The one architecture that is not in transformers. It imports poptorch.
        from optimum.graphcore.models import groupbert

        return getattr(groupbert, name)
    return getattr(transformers, name)


def _whisper_tokens(tokenizer: Any) -> Dict[str, Any]:
    token = tokenizer.convert_tokens_to_ids
    end = token("<|endoftext|>")
    return dict(
        # Entries after the last special token are points in time, 0.02 s apart.
        vocab_size=len(tokenizer) + 51,
        pad_token_id=end,
        bos_token_id=end,
        eos_token_id=end,
        decoder_start_token_id=token("<|startoftranscript|>"),
        begin_suppress_tokens=[end],
        suppress_tokens=[],
        forced_decoder_ids=[[1, token("<|en|>")], [2, token("<|transcribe|>")], [3, token("<|notimestamps|>")]],
    )


def _whisper_generation(tokenizer: Any) -> Dict[str, Any]:
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    token = tokenizer.convert_tokens_to_ids
    return dict(
        is_multilingual=True,
        lang_to_id={f"<|{language}|>": token(f"<|{language}|>") for language in LANGUAGES},
        task_to_id={task: token(f"<|{task}|>") for task in ("transcribe", "translate")},
        no_timestamps_token_id=token("<|notimestamps|>"),
        max_initial_timestamp_index=1,
    )


def write_whisper_generation(model: Path, folder: Path) -> None:
    """Write a `generation_config.json` with what points in time need into `folder`, for the Whisper in `model`."""
    import transformers

    tokenizer = transformers.WhisperTokenizer.from_pretrained(str(model))
    plain = transformers.GenerationConfig.from_pretrained(str(model)).to_dict()
    plain.pop("_from_model_config")  # with it, settings that only Whisper knows are dropped
    transformers.GenerationConfig(**{**plain, **_whisper_generation(tokenizer)}).save_pretrained(str(folder))


def write_model(name: str, folder: Path) -> None:
    """Write configuration, weights, tokenizer and feature extractor of the repository `name` into `folder`.

    The weights depend on the name alone, so a rebuild gives the same.
    """
    import torch
    import transformers

    model = MODELS[name]
    settings = dict(model.settings)
    if model.tokenizer is not None:
        tokenizer = write_tokenizer(model.tokenizer, _VOCABULARY, folder)
        settings.setdefault("vocab_size", len(tokenizer) + -len(tokenizer) % 8)
        if model.tokenizer == "whisper":
            settings.update(_whisper_tokens(tokenizer))
    cls = _class(model.weights)
    config = cls.config_class(**settings)
    config.architectures = [model.weights]
    state = torch.random.get_rng_state()
    torch.manual_seed(zlib.crc32(name.encode("utf-8")))
    try:
        weights = cls(config)
    finally:
        torch.random.set_rng_state(state)
    if model.endless:
        weights.final_logits_bias[:, config.eos_token_id] = -100.0
    weights.save_pretrained(str(folder))
    if model.extractor is not None:
        getattr(transformers, model.extractor)(**(model.extractor_settings or {})).save_pretrained(str(folder))
