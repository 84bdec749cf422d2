//! Counts and times every request, by route template.

use std::collections::HashMap;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use axum::extract::{MatchedPath, Request};
use axum::http::StatusCode;
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

/// The meter of a request: its own, or that of its seat, where a pop that rests on the way is one request.
#[derive(Debug)]
pub enum Metered {
    /// Of this request alone.
    Own(UnderWay),
    /// Of the pop in this seat.
    Seated(Seat),
}

impl Metered {
    /// A request has come, or a pop has come back to its seat.
    pub fn start(request: &Request) -> Metered {
        let route = request.extensions().get::<MatchedPath>();
        let Some(seat) = request.extensions().get::<Seat>() else { return Metered::Own(UnderWay::start(route)) };
        let under_way = seat.take_meter().unwrap_or_else(|| UnderWay::start(route));
        seat.keep(under_way, route.cloned());
        Metered::Seated(seat.clone())
    }

    /// It is answered.
    pub fn answered(self, status: StatusCode) {
        let under_way = match self {
            Metered::Own(under_way) => Some(under_way),
            Metered::Seated(seat) => seat.take_meter(),
        };
        if let Some(mut under_way) = under_way {
            under_way.status = Some(status.as_u16());
        }
    }
}

/// Requests so far, and those under way now.
pub fn requests() -> (u64, u64) {
    (METER.total.load(Ordering::Relaxed), METER.under_way.load(Ordering::Relaxed))
}
