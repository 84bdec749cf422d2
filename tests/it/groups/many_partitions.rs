//! Listings of groups (`spec/admin.md` §7.1 to §7.3).
