"""What `eval needle` and `eval ruler` share: contexts with facts in them, questions, strict scores, a judged grid."""
