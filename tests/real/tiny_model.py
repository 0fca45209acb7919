#!/usr/bin/env python3
"""Makes a Llama of 0.46 million random weights and a tokenizer for it: tiny_model.py FOLDER"""

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

folder = sys.argv[1]
# The same weights each time, so that the same prompts give the same tokens.
torch.manual_seed(0)

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    vocab_size=512,
    special_tokens=["<s>", "</s>", "<pad>"],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
)
text = [
    "the agent calls a tool and waits for the result of the tool call",
    "session key value cache pool token budget lease queue epoch",
]
tokenizer.train_from_iterator(text * 50, trainer)
PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
).save_pretrained(folder)

config = LlamaConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=32768,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
    tie_word_embeddings=False,
    dtype="bfloat16",
)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
