"""Models that are no text models: a module of one's own, a classifier of images, one of sounds."""

from __future__ import annotations

import numpy as np
import torch
import transformers
from peft import LoraConfig, get_peft_model
from PIL import Image
from scipy.io import wavfile
from tiny_bases import WORDS
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn


class Network(nn.Module):
    """Two layers, whose inputs are far from isotropic."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 24)
        self.second = nn.Linear(24, 8)

    def forward(self, x, scale=1.0):
        return self.second(torch.tanh(self.first(x))) * scale


def own_model(folder, rank=4):
    """Return a network, batches for it, and the directory of a LoRA on both of its layers."""
    torch.manual_seed(0)
    network = Network()
    lora = LoraConfig(r=rank, target_modules=["first", "second"], init_lora_weights=False)
    adapted = get_peft_model(network, lora)
    adapted.save_pretrained(folder / "lora")
    data = [torch.randn(8, 12) * torch.linspace(0.05, 2.0, 12) for _ in range(12)]
    return adapted.unload(), data, folder / "lora"


def save_lora(model, folder, targets, **options):
    """Write a model and a random LoRA on it."""
    model.save_pretrained(folder / "base")
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **options)
    get_peft_model(model, config).save_pretrained(folder / "lora")


def sentence_encoder(folder):
    """Write an encoder of sentences with a LoRA."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=32,
        initializer_range=0.3,
    )
    save_lora(
        transformers.BertModel(config),
        folder,
        ["query", "value"],
        task_type="FEATURE_EXTRACTION",
    )
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder / "base")


def image_classifier(folder, n_images=40):
    """Write a ViT with a LoRA, and a folder of images."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=8,
        num_labels=5,
        initializer_range=0.3,
    )
    save_lora(transformers.ViTForImageClassification(config), folder, ["q_proj", "v_proj"])
    size = {"height": 16, "width": 16}
    transformers.ViTImageProcessor(size=size).save_pretrained(folder / "base")
    draws = np.random.default_rng(0)
    (folder / "images").mkdir()
    for i in range(n_images):
        pixels = draws.integers(0, 256, (20, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{i}.png")


def speech_model(folder, n_sounds=36):
    """Write a Whisper of several languages with a LoRA, and a folder of sounds."""
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=40,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_mel_bins=80,
        max_source_positions=25,
        max_target_positions=12,
        decoder_start_token_id=1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        begin_suppress_tokens=None,
        suppress_tokens=None,
        init_std=0.3,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        is_multilingual=True,
        language="en",
        task="transcribe",
        lang_to_id={"<|en|>": 3},
        task_to_id={"transcribe": 4},
        no_timestamps_token_id=39,
    )
    save_lora(model, folder, ["q_proj", "v_proj"])
    extractor = transformers.WhisperFeatureExtractor(chunk_length=0.5)
    extractor.nb_max_frames = 50
    extractor.save_pretrained(folder / "base")
    draws = np.random.default_rng(0)
    (folder / "sounds").mkdir()
    for i in range(n_sounds):
        seconds = np.arange(4000) / 8000
        sound = np.sin(2 * np.pi * draws.uniform(200, 2000) * seconds)
        wavfile.write(folder / "sounds" / f"{i}.wav", 8000, (20000 * sound).astype(np.int16))
