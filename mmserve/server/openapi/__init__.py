"""What the HTTP surface takes and answers, as one OpenAPI document.

Owns the description of every route. The limits and the words in it are the parsers' own constants;
that both agree is tested from the document. Knows nothing of how anything is done.
"""
