#!/usr/bin/env python3
"""Streams FineWeb-Edu as JSON lines to standard output, for the trainers to read from a pipe:

  scripts/fineweb_edu.py | build/bin/train_125m --dataset fineweb_edu --config ...

Nothing is kept on the disk. A resumed run reads the same stream from its start again and passes over
what it has used, so keep --subset and --split as they were. Needs the package `datasets`
(pip install datasets). Not here: tokenizing, shuffling, retries beyond that package's own.
"""
import argparse
import json
import os
import sys


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", default="HuggingFaceFW/fineweb-edu",
                        help="data set, or a folder of .parquet or .jsonl files with a text column")
    parser.add_argument("--subset", default="sample-10BT", help="'' for a folder (%(default)s)")
    parser.add_argument("--split", default="train")
    parser.add_argument("--documents", type=int, default=0, help="how many; 0: all")
    args = parser.parse_args()
    try:
        from datasets import load_dataset
    except ImportError:
        sys.exit("fineweb_edu.py: needs the package datasets: pip install datasets")
    stream = load_dataset(args.source, args.subset or None, split=args.split, streaming=True)
    for number, row in enumerate(stream):
        if number == args.documents > 0:
            break
        sys.stdout.write(json.dumps({"text": row["text"]}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # the trainer has ended, which is no failure of the stream
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
