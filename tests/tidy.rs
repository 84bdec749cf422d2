//! The shape of the code, as a test: no database, one second. Each rule is a function from one file to what is wrong
//! with it, and each rule has a test that plants what it must find.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::{Path, PathBuf};

const LINES_MAX: usize = 500;

/// One source file, with its path from the root of the repository.
struct Source {
    path: String,
    text: String,
}

impl Source {
    #[cfg(test)]
    fn planted(path: &str, text: &str) -> Source {
        Source { path: path.to_owned(), text: text.to_owned() }
    }

    fn under(&self, directory: &str) -> bool {
        self.path.starts_with(directory)
    }

    /// Whether all of it is test code.
    fn is_test(&self) -> bool {
        self.under("tests/") || self.path.ends_with("/tests.rs") || self.path.contains("/tests/")
    }

    /// Lines of code with their numbers: no comments, and no `#[cfg(test)]` items.
    fn code(&self) -> Vec<(usize, &str)> {
        let mut lines = Vec::new();
        let mut skip_to: Option<String> = None;
        let mut armed = false;
        for (n, line) in self.text.lines().enumerate() {
            if let Some(end) = &skip_to {
                if line == end {
                    skip_to = None;
                }
                continue;
            }
            let trimmed = line.trim_start();
            if trimmed.starts_with("#[cfg(test)]") {
                armed = true;
                continue;
            }
            if armed {
                if trimmed.starts_with("#[") {
                    continue; // one more attribute of the same item
                }
                armed = false;
                if trimmed.ends_with('{') {
                    let indent = &line[..line.len() - trimmed.len()];
                    skip_to = Some(format!("{indent}}}"));
                }
                continue;
            }
            lines.push((n + 1, uncommented(line)));
        }
        lines
    }

    /// Reports every line of code that holds one of `words`.
    fn ban(&self, words: &[&str], why: &str) -> Vec<String> {
        let mut found = Vec::new();
        for (n, line) in self.code() {
            for word in words.iter().filter(|word| holds(line, word)) {
                found.push(format!("{}:{n}: {word}: {why}", self.path));
            }
        }
        found
    }
}

/// The line without its comment. A `//` inside a string starts with a colon here (a URL) or is not worth a parser.
fn uncommented(line: &str) -> &str {
    let comment = line.match_indices("//").find(|(at, _)| !line[..*at].ends_with(':'));
    comment.map_or(line, |(at, _)| &line[..at])
}

/// Whether `word` stands in `line`, not as the tail of a longer name.
fn holds(line: &str, word: &str) -> bool {
    let named = word.starts_with(|c: char| c.is_alphanumeric() || c == '_');
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        !named || !before.is_some_and(|c| c.is_alphanumeric() || c == '_')
    })
}

fn file_length(source: &Source) -> Vec<String> {
    let lines = source.text.lines().count();
    let too_long = lines > LINES_MAX && !source.path.contains("/generated/");
    too_long.then(|| format!("{}: {lines} lines, at most {LINES_MAX}", source.path)).into_iter().collect()
}

fn module_names(source: &Source) -> Vec<String> {
    const BANNED: [&str; 6] = ["utils", "util", "common", "helpers", "helper", "misc"];
    let mut names: Vec<&str> = source.path.trim_end_matches(".rs").split('/').collect();
    for line in source.text.lines() {
        let declared = line.trim_start().split_once("mod ").filter(|(before, _)| ["", "pub "].contains(before));
        names.extend(declared.map(|(_, name)| name.trim_end_matches([' ', ';', '{'])));
    }
    names.retain(|name| BANNED.contains(name));
    names.iter().map(|name| format!("{}: a module named {name}: name the thing", source.path)).collect()
}

fn sql_in_the_store(source: &Source) -> Vec<String> {
    if !source.under("src/") || source.under("src/store") || source.is_test() {
        return Vec::new();
    }
    let mut found = source.ban(&["sqlx::query", "raw_sql", "query_as", "query_scalar"], "SQL lives in src/store");
    if source.path != "src/app.rs" {
        found.extend(source.ban(&["sqlx"], "only src/store and src/app.rs name sqlx"));
    }
    found
}

fn arrows(source: &Source) -> Vec<String> {
    const LEAVES: [&str; 5] = ["src/ids", "src/clock", "src/metrics", "src/config", "src/spans"];
    let (banned, why): (&[&str], &str) = if source.under("src/http") {
        (&["sqlx", "store::", "crate::store"], "http calls the broker, never the store")
    } else if source.under("src/broker") {
        (&["axum", "hyper", "crate::http"], "the broker knows no HTTP")
    } else if source.under("src/store") {
        (&["axum", "hyper", "crate::http", "crate::broker", "broker::"], "the store knows no layer above it")
    } else if LEAVES.iter().any(|leaf| source.under(leaf)) {
        (&["crate::http", "crate::broker", "crate::store", "crate::app", "axum", "sqlx"], "a leaf imports no layer")
    } else {
        return Vec::new();
    };
    source.ban(banned, why)
}

fn sleeps(source: &Source) -> Vec<String> {
    let of_the_broker = source.under("tests/") || source.under("src/") && source.is_test();
    if source.path == "tests/it/harness/eventually.rs" || !of_the_broker {
        return Vec::new();
    }
    source.ban(&[concat!("sl", "eep(")], "wait with `eventually`")
}

fn panics(source: &Source) -> Vec<String> {
    if !source.under("src/") || source.is_test() {
        return Vec::new();
    }
    source.ban(&[".unwrap()", ".expect(", "panic!", "unreachable!"], "the broker answers an error instead")
}

/// Written in two halves here, so that this file does not hold them.
const LEFTOVERS: [&str; 5] = [
    concat!("to", "do!"),
    concat!("unimple", "mented!"),
    concat!("FIX", "ME"),
    concat!("TO", "DO"),
    concat!("X", "XX"),
];

fn leftovers(source: &Source) -> Vec<String> {
    let mut found = Vec::new();
    for (n, line) in source.text.lines().enumerate() {
        for word in LEFTOVERS.iter().filter(|word| holds(line, word)) {
            found.push(format!("{}:{}: {word}", source.path, n + 1));
        }
    }
    found
}

/// Metric names in `declarations` that have no row in `documentation`.
fn undocumented_metrics(declarations: &str, documentation: &str) -> Vec<String> {
    let literals = declarations.split('"').skip(1).step_by(2);
    literals
        .filter(|name| ["regent_", "queen_"].iter().any(|prefix| name.starts_with(prefix)))
        .filter(|name| name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_'))
        .filter(|name| !documentation.contains(&format!("`{name}`")))
        .map(|name| format!("src/metrics.rs: {name} has no row in docs/metrics.md"))
        .collect()
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn sources() -> Vec<Source> {
    let mut directories: Vec<PathBuf> = ["src", "tests", "load-tests", "benches"].map(|d| root().join(d)).into();
    let mut sources = Vec::new();
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(&directory).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() && path.file_name().is_some_and(|name| name != "target") {
                directories.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(root()).unwrap().to_string_lossy().into_owned();
                sources.push(Source { path: name, text: std::fs::read_to_string(&path).unwrap() });
            }
        }
    }
    assert!(sources.len() > 5, "the source tree is there");
    sources
}

fn check(rule: fn(&Source) -> Vec<String>) {
    let found: Vec<String> = sources().iter().flat_map(rule).collect();
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

#[test]
fn no_file_is_too_long() {
    check(file_length);
}

#[test]
fn no_module_is_a_drawer() {
    check(module_names);
}

#[test]
fn sql_stays_in_the_store() {
    check(sql_in_the_store);
}

#[test]
fn layers_import_downwards() {
    check(arrows);
}

#[test]
fn tests_do_not_sleep() {
    check(sleeps);
}

#[test]
fn the_broker_does_not_panic() {
    check(panics);
}

#[test]
fn nothing_is_left_over() {
    check(leftovers);
}

#[test]
fn metrics_are_documented() {
    let read = |path: &str| std::fs::read_to_string(root().join(path)).unwrap_or_default();
    let found = undocumented_metrics(&read("src/metrics.rs"), &read("docs/metrics.md"));
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

mod each_rule_can_fail {
    use super::*;

    #[track_caller]
    fn finds(rule: fn(&Source) -> Vec<String>, path: &str, text: &str) {
        assert_ne!(rule(&Source::planted(path, text)), Vec::<String>::new(), "must be found in {path}: {text}");
    }

    #[track_caller]
    fn passes(rule: fn(&Source) -> Vec<String>, path: &str, text: &str) {
        assert_eq!(rule(&Source::planted(path, text)), Vec::<String>::new(), "must pass in {path}: {text}");
    }

    #[test]
    fn file_length_counts_lines() {
        passes(file_length, "src/a.rs", &"x\n".repeat(LINES_MAX));
        finds(file_length, "src/a.rs", &"x\n".repeat(LINES_MAX + 1));
        passes(file_length, "src/generated/a.rs", &"x\n".repeat(LINES_MAX + 1));
    }

    #[test]
    fn module_names_are_read_from_paths_and_declarations() {
        finds(module_names, "src/utils.rs", "");
        finds(module_names, "src/http/common/mod.rs", "");
        finds(module_names, "src/lib.rs", "pub mod helpers;\n");
        finds(module_names, "src/lib.rs", "mod utils {\n}\n");
        passes(module_names, "src/http/push.rs", "mod commonplace;\nlet common = 1;\n");
    }

    #[test]
    fn sql_is_found_outside_the_store() {
        finds(sql_in_the_store, "src/broker/ack.rs", "sqlx::query(\"SELECT 1\")\n");
        finds(sql_in_the_store, "src/app.rs", "sqlx::query(\"SELECT 1\")\n");
        finds(sql_in_the_store, "src/http/mod.rs", "use sqlx::PgPool;\n");
        passes(sql_in_the_store, "src/store/cursors.rs", "sqlx::query(\"SELECT 1\")\n");
        passes(sql_in_the_store, "src/app.rs", "use sqlx::PgPool;\n");
        passes(sql_in_the_store, "src/broker/ack.rs", "// sqlx::query is for the store\n");
    }

    #[test]
    fn arrows_point_one_way() {
        finds(arrows, "src/http/push.rs", "use crate::store::Store;\n");
        finds(arrows, "src/http/push.rs", "use crate::{broker, store::Store};\n");
        finds(arrows, "src/http/push.rs", "use sqlx::PgPool;\n");
        finds(arrows, "src/broker/push.rs", "use axum::Json;\n");
        finds(arrows, "src/store/mod.rs", "use crate::broker::Broker;\n");
        finds(arrows, "src/store/mod.rs", "fn f() -> axum::Json<()> {}\n");
        finds(arrows, "src/ids.rs", "use crate::store::Store;\n");
        passes(arrows, "src/http/push.rs", "use crate::broker::Broker;\nlet x = self.restore::<u8>();\n");
        passes(arrows, "src/broker/push.rs", "use crate::store::Store;\n");
        passes(arrows, "src/app.rs", "use crate::store::Store;\n");
    }

    #[test]
    fn sleeps_are_found_in_tests_only() {
        let line = concat!("tokio::time::sl", "eep(one_second).await;\n");
        finds(sleeps, "tests/it/push.rs", line);
        finds(sleeps, "src/broker/ack/tests.rs", line);
        passes(sleeps, "tests/it/harness/eventually.rs", line);
        passes(sleeps, "src/broker/retention.rs", line);
    }

    #[test]
    fn panics_are_found_outside_test_modules() {
        finds(panics, "src/a.rs", "let x = y.unwrap();\n");
        finds(panics, "src/a.rs", "let x = y.expect(\"z\");\n");
        finds(panics, "src/a.rs", "    panic!(\"no\");\n");
        let test_module =
            "fn a() {}\n#[cfg(test)]\n#[allow(x)]\nmod tests {\n    fn b() {\n        c.unwrap();\n    }\n}\n";
        passes(panics, "src/a.rs", test_module);
        finds(panics, "src/a.rs", &format!("{test_module}fn late() {{ d.unwrap(); }}\n"));
        passes(panics, "src/a.rs", "#[cfg(test)]\nmod tests;\n");
        finds(panics, "src/a.rs", "#[cfg(test)]\nmod tests;\nfn f() { g.unwrap() }\n");
        passes(panics, "src/a.rs", "let x = y.unwrap_or_default(); // never .unwrap()\n");
        passes(panics, "tests/it/a.rs", "x.unwrap();\n");
    }

    #[test]
    fn leftovers_are_found_even_in_comments() {
        for word in LEFTOVERS {
            finds(leftovers, "src/a.rs", &format!("// {word} later\n"));
        }
        passes(leftovers, "src/a.rs", "// to do later\n");
    }

    #[test]
    fn undocumented_metrics_are_named() {
        let declarations = "counter(\"regent_acks_total\", \"help text\");\ngauge(\"queen_push_total\", \"more\");\n";
        assert_eq!(undocumented_metrics(declarations, "| `queen_push_total` | x |").len(), 1);
        assert_eq!(undocumented_metrics(declarations, "`regent_acks_total` `queen_push_total`"), Vec::<String>::new());
    }

    #[test]
    fn comments_and_urls_are_told_apart() {
        assert_eq!(uncommented("let a = 1; // one"), "let a = 1; ");
        assert_eq!(uncommented("let a = \"http://x\";"), "let a = \"http://x\";");
    }
}
