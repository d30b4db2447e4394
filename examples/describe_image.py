#!/usr/bin/env python3
"""Asks a vision-language model about an image, with its weights read from disk as they are needed.

    python examples/describe_image.py MODEL photo.jpg
    python examples/describe_image.py Qwen/Qwen2.5-VL-72B-Instruct photo.jpg --memory 24GB

MODEL is a folder, or the name of a model in the Hugging Face cache. Needs transformers and pillow, and for
some models torchvision.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image

import trunkline as tl


def inputs_for(processor: Any, image: Image.Image, question: str) -> Any:
    """Return the question and the image as the model expects them: by its chat template, if it has one."""
    if getattr(processor, "chat_template", None):
        content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
        return processor.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
    text = f"{getattr(processor, 'image_token', '<image>')} {question}"
    return processor(images=image, text=text, return_tensors="pt")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("image", metavar="IMAGE", type=Path)
    parser.add_argument("--question", default="What is in this image?")
    parser.add_argument(
        "--memory", metavar="SIZE", help="for weights, such as 8GB (half of what is available)"
    )
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="the most to generate (64)")
    options = parser.parse_args()

    model = tl.transformers.from_pretrained(options.model, memory_budget=options.memory)
    processor = transformers.AutoProcessor.from_pretrained(model.name_or_path, local_files_only=True)
    with Image.open(options.image) as image:
        inputs = inputs_for(processor, image.convert("RGB"), options.question).to(model.dtype)
    with torch.inference_mode():
        tokens = model.generate(**inputs, max_new_tokens=options.tokens, do_sample=False)
    print(processor.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)[0])
    stats = tl.stream.stats(model)
    print(
        f"{stats['memory_bytes'] / 1e9:.2f} GB of memory for weights, {stats['streamed_bytes'] / 1e9:.2f} GB "
        f"read for each token, {stats['passes']} passes in {stats['seconds']:.1f} s"
    )


if __name__ == "__main__":
    main()
