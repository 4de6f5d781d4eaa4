"""Embeddings by sentence-transformers: pairs, scored pairs, several datasets, evaluators."""

import sys

import torch
from datasets import Dataset, DatasetDict
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import CachedMultipleNegativesRankingLoss, CoSENTLoss, MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tiny_language import bert_config, history, lines, tokenizer
from transformers import BertModel, set_seed

from tests.scripts.evidence import Evidence

way = sys.argv[1]
set_seed(7)
words = tokenizer(kind="bert")
BertModel(bert_config(words)).save_pretrained("bert")
words.save_pretrained("bert")
