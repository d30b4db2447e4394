"""Safetensors files, as https://huggingface.co/docs/safetensors describes them: saved, and loaded."""

from trunkline.checkpoint._safetensors_folder import folder_headers, load_folder
from trunkline.checkpoint._safetensors_layout import lay_out
from trunkline.checkpoint._safetensors_load import Header, StoredTensor, load, load_files, read_header

__all__ = [
    "Header",
    "StoredTensor",
    "folder_headers",
    "lay_out",
    "load",
    "load_files",
    "load_folder",
    "read_header",
]
