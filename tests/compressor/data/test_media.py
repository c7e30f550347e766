"""Images, video and audio through processors of tiny models: rows, calibration sets by name and collators give the same inputs."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    ASTConfig,
    ASTFeatureExtractor,
    ASTForAudioClassification,
    CLIPImageProcessorPil,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    MllamaConfig,
    MllamaForConditionalGeneration,
    MllamaImageProcessorPil,
    MllamaProcessor,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
    Wav2Vec2Config,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForSequenceClassification,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

from compressor import GPTQModifier, QuantizationModifier, oneshot
from compressor.data.presets import find_preset
from compressor.data.processors import run_processor
from compressor.errors import DatasetError

SIZES = {
    "vocab_size": 270,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
TEXT = {**SIZES, "max_position_embeddings": 512, "pad_token_id": 256, "eos_token_id": 257, "bos_token_id": 258}
BYTES = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


def tokenizer(place: str, word: str) -> PreTrainedTokenizerFast:
    """One token a byte, and a chat template that marks the place of an image or of audio."""
    backend = Tokenizer(models.BPE(vocab=BYTES, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", bos_token="<s>")
    made.add_special_tokens({"additional_special_tokens": re.findall("<.*?>", place)})
    part = f"{{% if c['type'] == '{word}' %}}{place}{{% else %}}{{{{ c['text'] }}}}{{% endif %}}"
    made.chat_template = f"{{% for m in messages %}}{{{{ m['role'] }}}}:{{% for c in m['content'] %}}{part}{{% endfor %}}\n{{% endfor %}}"
    return made


def llava() -> tuple[Any, Any]:
    words = tokenizer("<image>", "image")
    images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    processor = LlavaProcessor(images, words, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1)
    processor.chat_template = words.chat_template
    vision = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    config = LlavaConfig(text_config={"model_type": "llama", **TEXT}, vision_config=vision, image_token_index=259)
    return LlavaForConditionalGeneration(config), processor


def mllama() -> tuple[Any, Any]:
    words = tokenizer("<|image|>", "image")
    images = MllamaImageProcessorPil(size={"height": 16, "width": 16}, max_image_tiles=4)
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2, "intermediate_size": 32}
    vision |= {"vision_output_dim": 64, "image_size": 16, "patch_size": 8, "max_num_tiles": 4, "intermediate_layers_indices": [0]}
    text = {**TEXT, "num_hidden_layers": 2, "cross_attention_layers": [1]}
    config = MllamaConfig(vision_config=vision, text_config=text, image_token_index=259)
    return MllamaForConditionalGeneration(config), MllamaProcessor(images, words, chat_template=words.chat_template)


def whisper() -> tuple[Any, Any]:
    marks = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|translate|>", "<|transcribe|>", "<|notimestamps|>"]
    words = WhisperTokenizer(vocab=BYTES | {mark: 256 + n for n, mark in enumerate(marks)}, merges=[], pad_token="<|endoftext|>")
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_mel_bins": 8}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_source_positions": 50, "max_target_positions": 64}
    config = WhisperConfig(**sizes, vocab_size=270, pad_token_id=256, bos_token_id=256, eos_token_id=256, decoder_start_token_id=257)
    return WhisperForConditionalGeneration(config), WhisperProcessor(WhisperFeatureExtractor(feature_size=8, chunk_length=1), words)


def qwen2_audio() -> tuple[Any, Any]:
    words = tokenizer("<a><|AUDIO|></a>", "audio")
    features = WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    processor = Qwen2AudioProcessor(features, words, chat_template=words.chat_template, audio_bos_token="<a>", audio_eos_token="</a>")
    audio = {"model_type": "qwen2_audio_encoder", "num_mel_bins": 8, "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2}
    audio |= {"encoder_ffn_dim": 32, "max_source_positions": 50}
    place = words.convert_tokens_to_ids("<|AUDIO|>")
    config = Qwen2AudioConfig(text_config={"model_type": "qwen2", **TEXT}, audio_config=audio, audio_token_index=place)
    return Qwen2AudioForConditionalGeneration(config), processor


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {"llava": llava, "mllama": mllama, "whisper": whisper, "qwen2_audio": qwen2_audio}


def made(name: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    return MODELS[name]()


def pictures(number: int = 4) -> list[Image.Image]:
    draw = np.random.RandomState(0)
    return [Image.fromarray(draw.randint(0, 255, (20 + 4 * n, 24, 3), dtype=np.uint8)) for n in range(number)]


def waves(number: int = 4) -> list[dict[str, Any]]:
    draw = np.random.RandomState(0)
    return [{"array": draw.randn(8000).astype(np.float32), "sampling_rate": 16000} for _ in range(number)]


def chat(word: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": word}, {"type": "text", "text": "What is it?"}]}]


ROWS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "llava": lambda: [{"text": f"<image> this is {n}", "image": one} for n, one in enumerate(pictures())],
    "mllama": lambda: [{"messages": chat("image"), "images": [one]} for one in pictures()],
    "whisper": lambda: [{"text": " Hello.", "audio": one} for one in waves()],
    "qwen2_audio": lambda: [{"messages": chat("audio"), "audio": one} for one in waves()],
}
TOWERS = {"llava": "model.vision_tower", "mllama": "model.vision_model", "whisper": "model.encoder", "qwen2_audio": "model.audio_tower"}


KEPT = ["re:.*lm_head", "re:.*proj_out"]
STATIC = {"targets": ["Linear"], "weights": {"num_bits": 8}, "input_activations": {"num_bits": 8, "dynamic": False}}


def static(*ignore: str) -> QuantizationModifier:
    return QuantizationModifier(config_groups={"all": STATIC}, ignore=[*KEPT, *ignore])


def ranges(result: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in result.model.state_dict().items() if name.endswith("input_scale")}


@pytest.mark.parametrize("name", MODELS)
def test_rows_with_media_reach_every_layer_of_the_tower(name: str, tmp_path: Path) -> None:
    """Of a model in memory with a processor, and of a folder that holds one."""
    model, processor = made(name)
    model.save_pretrained(tmp_path / "m")
    processor.save_pretrained(tmp_path / "m")
    given = ranges(oneshot(model, processor=processor, dataset=ROWS[name](), recipe=static()))
    found = oneshot(tmp_path / "m", model_class=type(model), dataset=ROWS[name](), recipe=static(), output_dir=tmp_path / "out")
    assert any(part.startswith(TOWERS[name]) for part in given) and len(given) == len(found.report.modules)
    assert all(torch.equal(value, ranges(found)[part]) for part, value in given.items())
    assert (tmp_path / "out" / "processor_config.json").read_bytes() == (tmp_path / "m" / "processor_config.json").read_bytes()


def test_a_file_of_rows_is_read_with_its_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    model, processor = made("llava")
    datasets.Dataset.from_list(ROWS["llava"]()).to_parquet(tmp_path / "rows.parquet")
    by_file = ranges(oneshot(model, processor=processor, dataset=str(tmp_path / "rows.parquet"), recipe=static()))
    by_rows = ranges(oneshot(made("llava")[0], processor=processor, dataset=ROWS["llava"](), recipe=static()))
    assert by_file.keys() == by_rows.keys() and all(torch.equal(value, by_rows[part]) for part, value in by_file.items())


def collate_one(rows: list[Any]) -> dict[str, torch.Tensor]:
    """As published scripts have it, for rows that a processor has gone over."""
    assert len(rows) == 1
    return {name: torch.tensor(value) for name, value in rows[0].items()}


@pytest.mark.parametrize("name", ["llava", "whisper"])
def test_a_processor_gives_what_a_collator_gives(name: str) -> None:
    model, processor = made(name)
    word = "images" if name == "llava" else "audio"

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        media = {"images": rows[0]["image"]} if name == "llava" else {"audio": rows[0]["audio"]["array"], "sampling_rate": 16000}
        inputs = processor(text=rows[0]["text"], **media, return_tensors="pt")
        return dict(inputs) if word == "images" else {"decoder_input_ids": inputs["labels"], "input_features": inputs["input_features"]}

    by_collator = ranges(oneshot(model, dataset=ROWS[name](), data_collator=collate, recipe=static()))
    by_rows = ranges(oneshot(made(name)[0], processor=processor, dataset=ROWS[name](), recipe=static()))
    assert by_collator.keys() == by_rows.keys() and all(torch.equal(value, by_rows[part]) for part, value in by_collator.items())


def test_a_set_of_images_by_its_name(hub: Any, tmp_path: Path) -> None:
    """As the published script of Mllama has it: the collator gets what the processor has made of the set's rows."""
    rows = [{"image": one, "caption": ["a dog", "on grass"]} for one in pictures()]
    file = io.BytesIO()
    datasets.Dataset.from_list(rows).to_parquet(file)
    hub.add("lmms-lab/flickr30k", {"data/test-00000.parquet": file.getvalue()}, "datasets")
    model, processor = made("mllama")
    model.save_pretrained(tmp_path / "m")
    processor.save_pretrained(tmp_path / "m")
    script: dict[str, Any] = {"dataset": "flickr30k", "splits": {"calibration": "test[:3]"}, "max_seq_length": 512}
    with_collator = oneshot(model, tokenizer=str(tmp_path / "m"), data_collator=collate_one, recipe=static(), **script)
    without = oneshot(type(model).from_pretrained(tmp_path / "m"), recipe=static(), num_calibration_samples=3, **script)
    assert with_collator.record["data"]["num_samples"] == without.record["data"]["num_samples"] == 3
    assert ranges(with_collator).keys() == ranges(without).keys()
    assert all(torch.equal(value, ranges(without)[part]) for part, value in ranges(with_collator).items())


@pytest.mark.parametrize(("name", "text"), [("whisper", " Hello you"), ("qwen2_audio", "user:<a><|AUDIO|></a>What did the person say?")])
def test_rows_of_the_set_of_speech_fit_the_model(name: str, text: str) -> None:
    _, processor = made(name)
    preset = find_preset("peoples_speech")
    assert preset is not None
    function = preset.row_function(processor)
    assert function is not None
    row = function({"text": "HELLO YOU", "audio": waves(1)[0], "id": "1"})
    said = row["text"] if name == "whisper" else processor.apply_chat_template(row["messages"], tokenize=False)
    assert said == text and row["audio"]["sampling_rate"] == 16000


def test_a_tower_is_compressed_layer_by_layer_or_left_alone() -> None:
    model, processor = made("llava")
    targets = ["CLIPEncoderLayer", "LlamaDecoderLayer"]
    recipe = GPTQModifier(targets="Linear", scheme="W8A8", ignore=KEPT, dampening_frac=0.1)
    result = oneshot(model, processor=processor, dataset=ROWS["llava"](), recipe=recipe, sequential_targets=targets)
    layers = ["vision_tower.encoder.layers.0", "vision_tower.encoder.layers.1", "language_model.layers.0"]
    assert [lap.name.removeprefix("model.") for lap in result.stages][:3] == layers
    assert sum(name.startswith("model.vision_tower.") for name in result.report.modules) == 12
    again, _ = made("llava")
    alone = oneshot(again, processor=processor, dataset=ROWS["llava"](), recipe=static("re:.*vision_tower.*", "re:.*projector.*"))
    assert alone.report.modules and not any("vision_tower" in name for name in alone.report.modules)
    static_too, _ = made("llava")  # a recipe that needs ranges alone takes the layers one after another where they are named
    result = oneshot(static_too, processor=processor, dataset=ROWS["llava"](), recipe=static(), sequential_targets=targets)
    assert [lap.name.removeprefix("model.") for lap in result.stages][:3] == layers


def test_padded_rows_keep_the_places_of_images() -> None:
    """The check of the mask exchanges tokens; the model refuses another number of places than there are features."""
    model, processor = made("llava")
    rows = [{"text": "<image> " + "long " * n, "image": one} for n, one in enumerate(pictures())]
    result = oneshot(model, processor=processor, dataset=rows, batch_size=2, recipe=static("re:.*vision_tower.*", "re:.*projector.*"))
    assert result.report.modules and result.record["data"]["num_samples"] == 4


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def wav2vec2() -> tuple[Any, Any]:
    convolutions = {"conv_dim": (32, 32), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_feat_extract_layers": 2}
    config = Wav2Vec2Config(**SMALL, **convolutions, num_conv_pos_embedding_groups=2, num_conv_pos_embeddings=4, classifier_proj_size=8)
    return Wav2Vec2ForSequenceClassification(config), Wav2Vec2FeatureExtractor()


def spectrogram() -> tuple[Any, Any]:
    config = ASTConfig(**SMALL, max_length=64, num_mel_bins=16)
    return ASTForAudioClassification(config), ASTFeatureExtractor(max_length=64, num_mel_bins=16)


def vit() -> tuple[Any, Any]:
    config = ViTConfig(**SMALL, image_size=16, patch_size=8)
    return ViTForImageClassification(config), ViTImageProcessorPil(size={"height": 16, "width": 16})


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("make", [wav2vec2, spectrogram, vit, whisper])
def test_a_processor_is_called_as_it_is_made_and_pads_in_its_own_way(make: Callable[[], tuple[Any, Any]], batch_size: int | None) -> None:
    """Parts by themselves take no text, and call audio what they like; features of Whisper have one length, whatever the texts do."""
    torch.manual_seed(0)
    model, processor = make()
    column, values = ("image", pictures()) if make is vit else ("audio", waves())
    if make is whisper:
        values = [{**one, "array": one["array"][: 4000 + 500 * n]} for n, one in enumerate(values)]
    rows = [{"text": "Hello.", column: one} for one in values]
    result = oneshot(model, processor=processor, dataset=rows, batch_size=batch_size, recipe=static())
    assert len(ranges(result)) == len(result.report.modules) > 5 and result.record["data"]["num_samples"] == 4


@pytest.mark.parametrize(("make", "name"), [(whisper, "decoder_input_ids"), (wav2vec2, "input_values")])
def test_padding_without_a_mask_is_refused_and_rows_one_by_one_are_not(make: Callable[[], tuple[Any, Any]], name: str) -> None:
    model, processor = make()
    rows = [{"text": "Hello." * n, "audio": {**one, "array": one["array"][: 4000 + 500 * n]}} for n, one in enumerate(waves(), 1)]
    with pytest.raises(DatasetError, match=f"pads '{name}' without a mask, and padding would count as tokens; leave batch_size out"):
        oneshot(model, processor=processor, dataset=rows, batch_size=2, recipe=static())
    assert oneshot(model, processor=processor, dataset=rows, recipe=static()).record["data"]["num_samples"] == len(rows)


def test_a_row_without_media_is_one_whatever_stands_in_its_column_and_stands_alone() -> None:
    rows = [{"image": pictures()[0], "text": "a <image>"}, {"image": None, "text": "a b"}]
    model, processor = made("llava")
    assert oneshot(model, processor=processor, dataset=rows, recipe=static()).record["data"]["num_samples"] == 2
    for second in ({"text": "a b"}, rows[1]):
        with pytest.raises(DatasetError, match="a row without 'image' was given beside rows with it in one batch"):
            oneshot(made("llava")[0], processor=processor, dataset=[rows[0], second], batch_size=2, recipe=static())


@pytest.mark.parametrize(("given", "found"), [({"padding": "max_length", "max_length": 16}, 16), ({}, 11)])
def test_texts_beside_media_are_padded_as_the_processor_pads_them(given: dict[str, Any], found: int) -> None:
    _, processor = made("llava")
    processor.text_kwargs = given
    batch = run_processor(processor, {"text": ["a <image>", "longer <image>"], "images": [[one] for one in pictures(2)]}, pads=True)
    assert batch["input_ids"].shape == (2, found)


def test_audio_at_another_rate_is_refused_with_both_rates() -> None:
    model, processor = wav2vec2()
    rows = [{"audio": {**one, "sampling_rate": 8000}} for one in waves(2)]
    with pytest.raises(DatasetError, match=r"row 0: the processor Wav2Vec2F.*Extractor \{\.\.\.\} was.*16000.*not 8000; cor"):
        oneshot(model, processor=processor, dataset=rows, recipe=static())


class Qwen2VLVideos(ProcessorMixin):  # type: ignore[misc]
    """Called as the processor of Qwen2-VL is, whose own part for videos wants torchvision: two frames of 8 x 8 become one token."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)

    def __call__(self, text: list[str], videos: list[Any], *, return_tensors: str, padding: bool = False) -> dict[str, torch.Tensor]:
        pixels = torch.stack([torch.as_tensor(np.stack([np.asarray(frame) for frame in video])) for video in videos])
        assert pixels.shape == (sum(one.count("<v>") for one in text), 2, 8, 8, 3)
        words = self.tokenizer(text, padding=padding, return_tensors=return_tensors)
        kinds = (words["input_ids"] == 259).int() * 2
        grids = torch.tensor([[1, 2, 2]] * len(videos))
        return {**words, "mm_token_type_ids": kinds, "pixel_values_videos": pixels.reshape(-1, 96) / 255, "video_grid_thw": grids}


def qwen2_vl() -> Any:
    torch.manual_seed(0)
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    text = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, video_token_id=259))


def test_a_video_is_an_array_or_a_list_of_its_frames() -> None:
    videos = [np.stack([np.asarray(one.resize((8, 8))) for one in pictures(4)[n : n + 2]]) for n in range(3)]
    frames = [[Image.fromarray(frame) for frame in video] for video in videos]
    processor = Qwen2VLVideos(tokenizer("<v>", "video"))
    ways: list[tuple[str, list[Any], int | None]] = [
        ("video", videos, None),
        ("video", frames, 2),
        ("videos", [[one] for one in frames], 2),
    ]
    seen = []
    for column, values, batch_size in ways:
        rows = [{"text": f"<v> what is it {n}", column: one} for n, one in enumerate(values)]
        seen.append(ranges(oneshot(qwen2_vl(), processor=processor, dataset=rows, batch_size=batch_size, recipe=static())))
    assert any(".visual." in name for name in seen[0])
    assert all(torch.allclose(value, one[name], rtol=1e-5) for one in seen[1:] for name, value in seen[0].items())
    two = [{"text": "<v> and <v>", "videos": [frames[0], frames[1]]}, {"text": "<v> or <v>", "videos": [frames[2], frames[1]]}]
    assert oneshot(qwen2_vl(), processor=processor, dataset=two, recipe=static()).record["data"]["num_samples"] == 2


def test_what_cannot_be_read_is_refused_by_name() -> None:
    model, processor = made("llava")
    with pytest.raises(DatasetError, match=r"column 'image' becomes an input of the model through its processor, .* pass processor="):
        oneshot(model, dataset=ROWS["llava"](), recipe=static())
    with pytest.raises(DatasetError, match="column 'image' becomes"):
        oneshot(model, dataset=ROWS["llava"](), tokenizer=processor.tokenizer, recipe=static())
    processor.chat_template = None
    with pytest.raises(DatasetError, match=r"the processor has no chat template; set processor\.chat_template"):
        oneshot(model, processor=processor, dataset=[{"messages": chat("image"), "image": pictures(1)[0]}], recipe=static())
    with pytest.raises(DatasetError, match="dataset row 0: the processor LlavaProcessor raised"):
        oneshot(model, processor=processor, dataset=[{"text": "<image>", "image": "nowhere.png"}], recipe=static())


def test_texts_for_a_model_in_memory_are_read_by_the_tokenizer_that_it_came_with(tmp_path: Path) -> None:
    model, processor = made("llava")
    model.save_pretrained(tmp_path / "m")
    processor.tokenizer.save_pretrained(tmp_path / "m")
    loaded = LlavaForConditionalGeneration.from_pretrained(tmp_path / "m")
    kept = static("re:.*vision_tower.*", "re:.*projector.*")
    result = oneshot(loaded, dataset=["some text", "more of it"], recipe=kept)
    assert any(f"texts are read by the tokenizer of {tmp_path / 'm'}" in note for note in result.report.notes)
    assert result.tokenizer("a")["input_ids"] == processor.tokenizer("a")["input_ids"]
    with pytest.raises(DatasetError, match="text needs a tokenizer, and the model has none"):
        oneshot(model, dataset=["some text"], recipe=static("re:.*vision_tower.*", "re:.*projector.*"))
