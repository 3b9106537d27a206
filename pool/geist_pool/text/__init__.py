"""Text in, token ids out, and back: pure values on both sides.

    checks      what text from a client may hold
    vocabulary  the `Vocabulary` value read from a model file; the bytes and the kind of every token
    stream      bytes of generated tokens to text, and stop strings (imported by workers: no tokenizer here)
    tokenizer   `Tokenizer`: text to ids (imports the `tokenizers` library)
    template    chat templates in jinja2's sandbox (imported by the template process only)
    suffix      what a rendering adds behind a context

Import the modules themselves; this file stays empty of imports so that a worker that wants `stream` does not
load a tokenizer or jinja2.
"""
