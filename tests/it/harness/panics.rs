//! A broker must not panic, also where nobody would notice: in a background task, or behind a caught request.

use std::sync::{Mutex, Once};

/// What panicked in this process outside the tests' own code.
static SEEN: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Notes every panic from now on.
pub fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let print = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if panic.location().is_some_and(|place| !place.file().contains("tests/")) {
                SEEN.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(panic.to_string());
            }
            print(panic);
        }));
    });
}

/// Fails the test if a broker of this process has panicked: this test's, or one that ran beside it.
pub fn expect_none() {
    let seen = SEEN.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone();
    assert!(seen.is_empty(), "a broker panicked: {seen:#?}");
}
