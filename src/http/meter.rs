//! Counts and times every request, by route template.

use std::collections::HashMap;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use axum::extract::{MatchedPath, Request};
use axum::middleware::Next;
use axum::response::Response;
use metrics::{Counter, Histogram, counter, histogram};

use super::resting::Seat;
use crate::metrics as names;

static METER: LazyLock<HttpMeter> = LazyLock::new(HttpMeter::new);

struct HttpMeter {
    routes: HashMap<&'static str, RouteMeter>,
    /// Of routes that the list in `metrics/labels.rs` lacks, and of paths that are no route.
    other: RouteMeter,
    total: AtomicU64,
    under_way: AtomicU64,
}

#[derive(Clone, Debug)]
struct RouteMeter {
    /// In the order of [`names::HTTP_STATUS`].
    by_status: Vec<Counter>,
    seconds: Histogram,
}

impl HttpMeter {
    fn new() -> HttpMeter {
        let routes: HashMap<_, _> = names::ROUTES.iter().map(|route| (*route, RouteMeter::new(route))).collect();
        HttpMeter {
            routes,
            other: RouteMeter::new(names::OTHER),
            total: AtomicU64::new(0),
            under_way: AtomicU64::new(0),
        }
    }
}

impl RouteMeter {
    fn new(route: &'static str) -> RouteMeter {
        let by_status = names::HTTP_STATUS
            .iter()
            .map(|status| counter!(names::HTTP_REQUESTS, "route" => route, "status" => *status))
            .collect();
        let timed = if names::TIMED_ROUTES.contains(&route) { route } else { names::OTHER };
        RouteMeter { by_status, seconds: histogram!(names::HTTP_SECONDS, "route" => timed) }
    }
}

/// One request under way. Dropped without an answer, its client hung up.
#[derive(Debug)]
pub struct UnderWay {
    route: &'static RouteMeter,
    started: Instant,
    status: Option<u16>,
}

impl UnderWay {
    fn start(route: Option<&MatchedPath>) -> UnderWay {
        let meter = &*METER;
        meter.under_way.fetch_add(1, Ordering::Relaxed);
        meter.total.fetch_add(1, Ordering::Relaxed);
        let route = route.and_then(|route| meter.routes.get(route.as_str())).unwrap_or(&meter.other);
        UnderWay { route, started: Instant::now(), status: None }
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        METER.under_way.fetch_sub(1, Ordering::Relaxed);
        let class = match self.status {
            None => 4,
            Some(300..400) => 1,
            Some(400..500) => 2,
            Some(500..) => 3,
            Some(_) => 0,
        };
        if let Some(counter) = self.route.by_status.get(class) {
            counter.increment(1);
        }
        self.route.seconds.record(self.started.elapsed().as_secs_f64());
    }
}

/// The outermost layer of the router.
pub async fn measure(request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>();
    let Some(seat) = request.extensions().get::<Seat>().cloned() else {
        let mut under_way = UnderWay::start(route);
        let response = next.run(request).await;
        under_way.status = Some(response.status().as_u16());
        return response;
    };
    // A pop that rests on the way is one request.
    let under_way = seat.take_meter().unwrap_or_else(|| UnderWay::start(route));
    seat.keep(under_way, route.cloned());
    let response = next.run(request).await;
    if let Some(mut under_way) = seat.take_meter() {
        under_way.status = Some(response.status().as_u16());
    }
    response
}

/// Requests so far, and those under way now.
pub fn requests() -> (u64, u64) {
    (METER.total.load(Ordering::Relaxed), METER.under_way.load(Ordering::Relaxed))
}
