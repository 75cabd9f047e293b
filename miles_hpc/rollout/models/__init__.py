"""SGLang's external model package (`SGLANG_EXTERNAL_MODEL_PACKAGE`) in exact numerics."""
