//! Random histories by proptest that can be told again from their seed.

use std::cell::Cell;

use proptest::strategy::Strategy;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseResult, TestRng, TestRunner};

/// A number from the environment.
pub fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

/// Tells `REGENT_IT_HISTORIES` histories, else `histories`, drawn from `REGENT_IT_SEED`, else from a random seed; each gets
/// its number. A failure names the seed and the shortest history that proptest finds.
pub fn tell<S: Strategy>(histories: u32, drawn: &S, history: impl Fn(u64, S::Value) -> TestCaseResult) {
    let seed = number("REGENT_IT_SEED").unwrap_or_else(rand::random);
    let histories = number("REGENT_IT_HISTORIES").map_or(histories, |n| n as u32);
    if let Err(failure) = tell_from(seed, histories, drawn, history) {
        panic!("{failure}");
    }
}

fn tell_from<S: Strategy>(
    seed: u64,
    histories: u32,
    drawn: &S,
    history: impl Fn(u64, S::Value) -> TestCaseResult,
) -> Result<(), String> {
    let config = Config { cases: histories, failure_persistence: None, max_shrink_iters: 300, ..Config::default() };
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    let told = Cell::new(0);
    let outcome = runner.run(drawn, |drawn| history(told.replace(told.get() + 1), drawn));
    outcome.map_err(|failure| format!("REGENT_IT_SEED={seed}: {failure}"))
}

#[test]
fn a_failure_names_the_seed_and_the_same_seed_fails_the_same_way() {
    let failure = |seed| {
        let seen = std::cell::RefCell::new(Vec::new());
        let failure = tell_from(seed, 1000, &(0u64..1_000_000), |_, n| {
            seen.borrow_mut().push(n);
            if n > 900_000 { Err(proptest::test_runner::TestCaseError::fail("too large")) } else { Ok(()) }
        });
        (failure.unwrap_err(), seen.into_inner())
    };
    let (first, other) = (failure(7), failure(8));
    assert!(first.0.starts_with("REGENT_IT_SEED=7: ") && first.0.contains("900001"), "{}", first.0);
    assert_eq!(first, failure(7));
    assert_ne!(first.1[0], other.1[0]);
}
