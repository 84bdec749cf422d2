//! `GET /openapi.json`: the built routes of [`super::routes`] as an OpenAPI 3.1 document.

use std::sync::LazyLock;

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde_json::json;
use utoipa::openapi::content::ContentBuilder;
use utoipa::openapi::extensions::ExtensionsBuilder;
use utoipa::openapi::path::{HttpMethod, Operation, OperationBuilder, ParameterBuilder, ParameterIn};
use utoipa::openapi::request_body::RequestBodyBuilder;
use utoipa::openapi::response::ResponseBuilder;
use utoipa::openapi::schema::{ObjectBuilder, Type};
use utoipa::openapi::{Info, OpenApi, OpenApiBuilder, PathItem, PathsBuilder, Required};

use super::routes::{Access, Method, ROUTES, Route};
use super::{parameters, shapes};

static DOCUMENT: LazyLock<OpenApi> = LazyLock::new(describe);

/// Serves the document.
pub async fn document() -> Response {
    Json(&*DOCUMENT).into_response()
}

/// The document. A `{*rest}` of a path is written `{rest}`: OpenAPI has no other spelling for it.
pub fn describe() -> OpenApi {
    let built = ROUTES.iter().filter(|route| route.handler.is_some());
    let paths = built.fold(PathsBuilder::new(), |paths, route| {
        paths.path(route.path.replace("{*", "{"), PathItem::new(http_method(route.method), operation(route)))
    });
    let mut info = Info::new("Regent", env!("CARGO_PKG_VERSION"));
    info.description = Some("A message broker on PostgreSQL that speaks the Queen MQ 1.x HTTP protocol.".into());
    OpenApiBuilder::new().info(info).paths(paths).build()
}

const DONE: (&str, &str) = ("2XX", "Done");
const REFUSED: (&str, &str) = ("4XX", "Refused: `error` says why, and nothing changed");
/// No database.
pub const AWAY: (&str, &str) = ("503", "No database connection; try again after `Retry-After` seconds");

fn operation(route: &Route) -> Operation {
    let extensions = ExtensionsBuilder::new()
        .add("x-access", json!(route.access.name()))
        .add("x-scope", json!(route.scope.name()))
        .build();
    let mut operation = OperationBuilder::new()
        .operation_id(Some(operation_id(route)))
        .tag(tag(route.path))
        .summary(Some(route.summary))
        .extensions(Some(extensions));
    for name in path_parameters(route.path) {
        let text = ObjectBuilder::new().schema_type(Type::String);
        let parameter = ParameterBuilder::new().name(name).parameter_in(ParameterIn::Path).required(Required::True);
        operation = operation.parameter(parameter.schema(Some(text)));
    }
    for parameter in parameters::of(route).iter().copied().flatten() {
        let described = ParameterBuilder::new()
            .name(parameter.name)
            .parameter_in(ParameterIn::Query)
            .required(Required::False)
            .description(Some(parameter.about))
            .schema(Some(parameter.kind.schema()));
        operation = operation.parameter(described);
    }
    if let Some((required, schema)) = shapes::body_of(route) {
        let content = ContentBuilder::new().schema(schema).build();
        let required = if required { Required::True } else { Required::False };
        let body = RequestBodyBuilder::new().content("application/json", content).required(Some(required));
        operation = operation.request_body(Some(body.build()));
    }
    for (status, description) in answers_of(route) {
        let mut answer = ResponseBuilder::new().description(*description);
        if let Some(schema) = shapes::answer_of(route, status) {
            answer = answer.content("application/json", ContentBuilder::new().schema(Some(schema)).build());
        }
        operation = operation.response(*status, answer);
    }
    operation.build()
}

/// Status and meaning of each answer.
fn answers_of(route: &Route) -> &'static [(&'static str, &'static str)] {
    match (shapes::statuses_of(route), route.access) {
        ([], Access::Public) => &[DONE, REFUSED],
        ([], _) => &[DONE, REFUSED, AWAY],
        (stated, _) => stated,
    }
}

/// The method and the literal segments: unique, because no two routes differ by a parameter alone.
fn operation_id(route: &Route) -> String {
    let words = route.path.split(['/', '.', '-', '{', '}', '*']).filter(|word| !word.is_empty());
    let words = words.filter(|word| *word != "api");
    words.fold(route.method.name().to_lowercase(), |id, word| {
        let (first, rest) = word.split_at(1);
        id + &first.to_uppercase() + rest
    })
}

/// The first literal segment after the version.
fn tag(path: &str) -> &str {
    path.split('/').find(|word| !["", "api", "v1"].contains(word)).unwrap_or_default()
}

fn path_parameters(path: &str) -> impl Iterator<Item = &str> {
    path.split('/')
        .filter_map(|segment| segment.strip_prefix('{')?.strip_suffix('}'))
        .map(|n| n.trim_start_matches('*'))
}

fn http_method(method: Method) -> HttpMethod {
    match method {
        Method::Get => HttpMethod::Get,
        Method::Post => HttpMethod::Post,
        Method::Put => HttpMethod::Put,
        Method::Delete => HttpMethod::Delete,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn operation_ids_are_unique() {
        let ids: BTreeSet<String> = ROUTES.iter().map(operation_id).collect();
        assert_eq!(ids.len(), ROUTES.len());
        assert!(ids.contains("getV1PopQueueQueuePartitionPartition"), "{ids:?}");
    }
}
