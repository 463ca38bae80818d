"""Operations on arrays that are not MXNet's."""
