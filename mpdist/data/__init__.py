"""Text to rows of token ids: read, tokenise, pack and index once, then memory-map.

``prepare`` makes a folder, ``open_rows`` opens it, ``Order`` says which rows a global window has, ``deal`` gives them
to ranks and micro-batches, and ``collate`` makes the arrays. Everything here speaks of flat values and numpy arrays.
"""

from mpdist.data.batch import IGNORED, collate, micro_batches
from mpdist.data.order import Order, deal
from mpdist.data.prepare import check_vocabulary, prepare, report_lines
from mpdist.data.records import Source
from mpdist.data.store import Rows, open_rows
from mpdist.data.tokens import byte_tokenizer, load_tokenizer

__all__ = [
    "IGNORED",
    "Order",
    "Rows",
    "Source",
    "byte_tokenizer",
    "check_vocabulary",
    "collate",
    "deal",
    "load_tokenizer",
    "micro_batches",
    "open_rows",
    "prepare",
    "report_lines",
]
