//! The read side of the admin surface (`spec/admin.md`).

mod routes;
