"""The .moe language: text to syntax tree and back to text. Nothing here knows what a program means.

`moe.lark` is the reference of the syntax, `ast.py` the tree, `parser.py` makes it, `formatter.py` is `moec fmt`.
"""
