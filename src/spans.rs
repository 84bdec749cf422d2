//! Spans of requests, of the flushes that carry them, and of their statements, sent to an OpenTelemetry collector.
//!
//! Off by default, and then one load of a static decides: nothing is allocated, nothing is attached. What is on is sampled
//! where a trace begins; a request that is not sampled makes no spans further down. The queue of the exporter is
//! bounded and drops what has no room (`OTEL_BSP_MAX_QUEUE_SIZE`), so a collector that is away costs spans and nothing else.
//!
//! A flush is shared: its span is a child of the first request that it carries and linked to the others.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use opentelemetry::propagation::{Extractor, TextMapPropagator};
use opentelemetry::trace::{
    Link, Span as _, SpanContext, SpanKind, Status, TraceContextExt, Tracer as _, TracerProvider as _,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_http::hyper::HyperClient;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{ExporterBuildError, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{Sampler, SdkTracer, SdkTracerProvider, Span};
use tokio::runtime::Handle;

use crate::config::TracesConfig;

static TRACER: OnceLock<SdkTracer> = OnceLock::new();

/// Longest wait for one answer of the collector.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest wait for the last spans at the end of the process.
const STOP_MAX: Duration = Duration::from_secs(3);
/// Requests that one flush is linked to.
const LINKS_MAX: usize = 100;

/// Sends spans until it is stopped.
#[derive(Debug)]
pub struct Exporter(SdkTracerProvider);

/// Begins to trace if `config` says so. Call it on the runtime that stays until [`Exporter::stop`].
///
/// # Errors
/// The endpoint or another variable of OpenTelemetry is unusable.
pub fn start(config: &TracesConfig, instance: &str) -> Result<Option<Exporter>, ExporterBuildError> {
    if !config.traces {
        return Ok(None);
    }
    let mut exporter = SpanExporter::builder().with_http().with_http_client(Sender::new());
    if let Some(endpoint) = &config.traces_endpoint {
        exporter = exporter.with_endpoint(endpoint);
    }
    let resource = Resource::builder().with_attributes([
        KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
        KeyValue::new("service.instance.id", instance.to_owned()),
    ]);
    let resource = match std::env::var_os("OTEL_SERVICE_NAME") {
        Some(name) if !name.is_empty() => resource,
        _ => resource.with_service_name("regent"),
    };
    let provider = SdkTracerProvider::builder()
        .with_batch_exporter(exporter.build()?)
        .with_sampler(Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(config.traces_ratio))))
        .with_resource(resource.build())
        .build();
    let _ = TRACER.set(provider.tracer("regent"));
    tracing::info!(ratio = config.traces_ratio, "traces are sent");
    Ok(Some(Exporter(provider)))
}

impl Exporter {
    /// Sends what is left, for a few seconds at most.
    pub async fn stop(self) {
        let stopped = tokio::task::spawn_blocking(move || self.0.shutdown_with_timeout(STOP_MAX)).await;
        if !matches!(stopped, Ok(Ok(()))) {
            tracing::warn!("the last traces were not sent");
        }
    }
}

/// Whether spans are made.
pub fn is_on() -> bool {
    TRACER.get().is_some()
}

/// The span of a request that is under way. It ends when the last clone of it is dropped.
#[derive(Clone, Debug)]
pub struct RequestSpan(Context);

/// Begins the span of a request. `headers` may name its parent (W3C `traceparent`). `None`: nobody traces it.
pub fn request(method: &str, route: &str, headers: &dyn Extractor) -> Option<RequestSpan> {
    let tracer = TRACER.get()?;
    let parent = TraceContextPropagator::new().extract_with_context(&Context::new(), headers);
    let span = tracer
        .span_builder(format!("{method} {route}"))
        .with_kind(SpanKind::Server)
        .with_attributes([
            KeyValue::new("http.request.method", method.to_owned()),
            KeyValue::new("http.route", route.to_owned()),
        ])
        .start_with_context(tracer, &parent);
    span.is_recording().then(|| RequestSpan(Context::new().with_span(span)))
}

impl RequestSpan {
    /// Runs the work of the request.
    pub async fn around<F: Future>(&self, work: F) -> F::Output {
        within(Some(self.0.clone()), work).await
    }

    /// How it was answered.
    pub fn answered(&self, status: u16) {
        let span = self.0.span();
        span.set_attribute(KeyValue::new("http.response.status_code", i64::from(status)));
        if status >= 500 {
            span.set_status(Status::error(""));
        }
    }
}

/// The place in a trace of work that others will do: travels with it to another task.
#[derive(Clone, Debug, Default)]
pub struct Place(Option<Box<SpanContext>>);

impl Place {
    /// Itself, if it is one: a list of none allocates nothing.
    pub fn if_traced(self) -> Option<Place> {
        self.0.is_some().then_some(self)
    }
}

/// Where the caller is, if it is traced.
pub fn here() -> Place {
    if !is_on() {
        return Place(None);
    }
    Place(Context::map_current(|context| {
        let here = context.span().span_context().clone();
        here.is_sampled().then(|| Box::new(here))
    }))
}

/// Runs `work` in a span of its own, below the first of these places and linked to the others; without one, without.
pub async fn shared<F: Future>(name: &'static str, places: impl IntoIterator<Item = Place>, work: F) -> F::Output {
    within(shared_span(name, places), work).await
}

fn shared_span(name: &'static str, places: impl IntoIterator<Item = Place>) -> Option<Context> {
    let tracer = TRACER.get()?;
    let mut places = places.into_iter().filter_map(|place| place.0);
    let parent = Context::new().with_remote_span_context(*places.next()?);
    let links: Vec<Link> = places.take(LINKS_MAX).map(|place| Link::with_context(*place)).collect();
    let span = tracer
        .span_builder(name)
        .with_attributes([KeyValue::new("regent.traced_requests", links.len() as i64 + 1)])
        .with_links(links)
        .start_with_context(tracer, &parent);
    Some(Context::new().with_span(span))
}

/// What a new task must be given to stay in the trace of the task that starts it.
pub fn carried<F: Future>(work: F) -> impl Future<Output = F::Output> {
    let context = is_on().then(Context::current);
    within(context, work)
}

async fn within<F: Future>(context: Option<Context>, work: F) -> F::Output {
    let mut work = pin!(work);
    poll_fn(|task| {
        let _attached = context.clone().map(Context::attach);
        work.as_mut().poll(task)
    })
    .await
}

/// The span of one statement; ends with [`Statement::done`], or when it is dropped.
#[derive(Debug)]
pub struct Statement(Option<Box<Span>>);

/// Begins the span of a statement, if the caller is traced.
pub fn statement(words: &'static str) -> Statement {
    let Some(tracer) = TRACER.get() else { return Statement(None) };
    Statement(Context::map_current(|context| {
        if !context.span().span_context().is_sampled() {
            return None;
        }
        let span = tracer
            .span_builder(words)
            .with_kind(SpanKind::Client)
            .with_attributes([KeyValue::new("db.system.name", "postgresql"), KeyValue::new("db.query.summary", words)])
            .start_with_context(tracer, context);
        Some(Box::new(span))
    }))
}

impl Statement {
    /// It was answered, or failed.
    pub fn done<T, E: std::fmt::Display>(self, outcome: &Result<T, E>) {
        if let (Some(mut span), Err(error)) = (self.0, outcome) {
            span.set_status(Status::error(error.to_string()));
        }
    }
}

/// Sends from the exporter's own thread by way of the runtime, which that thread is not part of.
#[derive(Debug)]
struct Sender {
    client: Arc<dyn HttpClient>,
    runtime: Handle,
}

impl Sender {
    fn new() -> Sender {
        let connector =
            hyper_rustls::HttpsConnectorBuilder::new().with_webpki_roots().https_or_http().enable_http1().build();
        Sender { client: Arc::new(HyperClient::new(connector, EXPORT_TIMEOUT, None)), runtime: Handle::current() }
    }
}

type Sending<'a> = Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'a>>;

impl HttpClient for Sender {
    fn send_bytes<'a, 'b>(&'a self, request: Request<Bytes>) -> Sending<'b>
    where
        'a: 'b,
        Self: 'b,
    {
        let client = self.client.clone();
        let sent = self.runtime.spawn(async move { client.send_bytes(request).await });
        Box::pin(async move { sent.await? })
    }
}
