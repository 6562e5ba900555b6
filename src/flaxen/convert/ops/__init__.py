"""Operations of the conversion system, each with its inverse."""
