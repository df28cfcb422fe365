# SPDX-License-Identifier: Apache-2.0
"""What the extension was built against; CMake writes the module."""

TORCH_VERSION: str
