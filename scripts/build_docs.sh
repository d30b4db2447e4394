#!/usr/bin/env bash
# Builds the documentation site into build/docs, strictly: a link, anchor or name that leads nowhere is an error. First
# checks that what is generated into docs/ is current. Expects scripts/setup.sh docs and scripts/install_package.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

.venv/bin/python scripts/make_cli_reference.py --check
export NO_MKDOCS_2_WARNING=1
.venv/bin/python -m mkdocs build --quiet
# Pages must not fetch anything from elsewhere.
if grep -rlE --include='*.html' '<(script|img|iframe|source)[^>]* src="?(https?:)?//|<link[^>]* rel="?(stylesheet|preconnect|icon)[^>]* href="?(https?:)?//' build/docs; then
  echo "build_docs: these pages load something from another site" >&2
  exit 1
fi
# GitHub begins a list or a fence in more places than Python-Markdown, which shows their marks as text.
if grep -rPlz --include='*.html' '<p>[^<]*(\n[-*] |\n?```)' build/docs; then
  echo "build_docs: a list or code block in these pages is shown as text; put a blank line before it, and no fence in a list" >&2
  exit 1
fi
echo "built build/docs/index.html"
