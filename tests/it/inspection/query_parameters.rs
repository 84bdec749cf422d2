//! The query parameters of the OpenAPI document are those that the handlers read: the sources of `src/http` are searched for
//! what each handler, and each function that it hands its query on to, reads by name.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use regent::http::routes::ROUTES;
use regent::http::{openapi, parameters};
use regex::Regex;

/// Functions of `src/http` by `module::name`, with their text.
fn functions() -> BTreeMap<String, String> {
    let start = Regex::new(r"(?m)^(?:pub(?:\([a-z]+\))? )?(?:async )?fn ([a-z_0-9]+)").unwrap();
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/http");
    let mut functions = BTreeMap::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let Some(module) = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".rs")) else { continue };
        let text = std::fs::read_to_string(&path).unwrap();
        let code = text.split("#[cfg(test)]").next().unwrap();
        for found in start.captures_iter(code) {
            let from = found.get(0).unwrap().start();
            let to = code[from..].find("\n}\n").map_or(code.len(), |end| from + end);
            functions.insert(format!("{module}::{}", &found[1]), code[from..to].to_owned());
        }
    }
    functions
}

/// What a function reads from the query, and what those read that take the query from it.
fn keys(name: &str, functions: &BTreeMap<String, String>, seen: &mut BTreeSet<String>) -> BTreeSet<String> {
    let Some(text) = functions.get(name).filter(|_| seen.insert(name.to_owned())) else { return BTreeSet::new() };
    // `query.text("key")`, `instant_of(query, "key")`, and closures that take the key alone.
    let read = Regex::new(
        r#"(?:query|\)\?)\s*\.(?:text|name|given|integer|boolean)\("(\w+)"|instant_of\(&?query, "(\w+)"|\b(?:name|label|positive|number)\("(\w+)""#,
    )
    .unwrap();
    let mut keys: BTreeSet<String> = read
        .captures_iter(text)
        .map(|found| found.iter().skip(1).flatten().next().unwrap().as_str().to_owned())
        .collect();
    let (module, (_, body)) = (name.split("::").next().unwrap(), text.split_once('{').unwrap());
    let takes_query = |other: &&String| functions[*other].split('{').next().unwrap().contains("query: ");
    // A function, not a method.
    for found in Regex::new(r"(?:^|[^.\w]|\.\.)([a-z_]+)\(").unwrap().captures_iter(body) {
        let is_named = |other: &&String| other.ends_with(&format!("::{}", &found[1]));
        let callees: Vec<&String> = functions.keys().filter(is_named).filter(takes_query).collect();
        let own = callees.iter().copied().find(|callee| callee.starts_with(&format!("{module}::")));
        for callee in own.map_or(callees, |own| vec![own]) {
            keys.extend(self::keys(callee, functions, seen));
        }
    }
    keys
}

#[test]
fn the_documented_query_parameters_are_those_that_handlers_read() {
    let functions = functions();
    let document = serde_json::to_value(openapi::describe()).unwrap();
    let mut with_some = 0;
    for route in ROUTES.iter().filter(|route| route.handler.is_some()) {
        let read = keys(route.handled_by.unwrap(), &functions, &mut BTreeSet::new());
        let path = route.path.replace("{*", "{");
        let operation = &document["paths"][&path][route.method.name().to_lowercase()];
        let documented: BTreeSet<String> = operation["parameters"]
            .as_array()
            .into_iter()
            .flatten()
            .filter(|parameter| parameter["in"] == "query")
            .map(|parameter| parameter["name"].as_str().unwrap().to_owned())
            .collect();
        assert_eq!(documented, read, "{} {path}: documented, read by {:?}", route.method.name(), route.handled_by);
        let declared: Vec<_> = parameters::of(route).iter().copied().flatten().map(|one| one.name).collect();
        assert_eq!(declared.len(), documented.len(), "{path}: none twice");
        with_some += usize::from(!documented.is_empty());
    }
    assert!(with_some > 20, "{with_some} routes with query parameters: the search finds what is read");
}
