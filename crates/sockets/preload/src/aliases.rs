//! Functions with several C names.

/// Defines further C names of functions. Arguments that an alias has beyond those of its function are ignored.
macro_rules! aliases {
    ($(
        $(#[$doc:meta])*
        $name:ident($($argument:ident: $type:ty),*) -> $result:ty = $function:ident($($passed:expr),*);
    )*) => {$(
        $(#[$doc])*
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> $result {
            // SAFETY: the C program's call requires the arguments to be valid, as the manual page of the function says.
            unsafe { $function($($passed),*) }
        }
    )*};
}
