//! Structs of counters that are added field by field.

/// Defines a struct whose `+=` adds every field.
#[macro_export]
macro_rules! counters {
    ($(#[$meta:meta])* $vis:vis struct $name:ident {
        $($(#[$field_meta:meta])* $field_vis:vis $field:ident: $kind:ty,)*
    }) => {
        $(#[$meta])*
        $vis struct $name {
            $($(#[$field_meta])* $field_vis $field: $kind,)*
        }

        impl std::ops::AddAssign for $name {
            fn add_assign(&mut self, more: Self) {
                $(self.$field += more.$field;)*
            }
        }
    };
}
