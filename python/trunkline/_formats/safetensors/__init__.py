"""Safetensors files, as https://huggingface.co/docs/safetensors describes them: saved, and loaded."""

from trunkline._formats.safetensors.folder import folder_headers, load_folder
from trunkline._formats.safetensors.layout import lay_out, write_to
from trunkline._formats.safetensors.loader import (
    Header,
    StoredTensor,
    header_of,
    load,
    load_files,
    read_header,
)

__all__ = [
    "Header",
    "StoredTensor",
    "folder_headers",
    "header_of",
    "lay_out",
    "load",
    "load_files",
    "load_folder",
    "read_header",
    "write_to",
]
