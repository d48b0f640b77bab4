//! `crosslane router fib`: what a node forwards where.

use std::net::IpAddr;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use ipnet::IpNet;
use router_node::control::{METRIC_NEIGHBOUR, RouteKind};
use router_node::management::{FibQuery, Request, Response, Route, RouteHop};
use serde::Serialize;
use stats::{Align, Table};

use super::loaded::LoadedCluster;
use super::request::request;
use crate::output;
use crate::rack_control::{ANSWER_LIMIT, receive};
use crate::wrong_use::WrongUse;

/// What to show, and how.
#[derive(clap::Args)]
pub struct Options {
    /// The cluster file
    #[arg(long, value_name = "FILE")]
    cluster: PathBuf,
    /// The node that is asked [default: the first that is up]
    #[arg(long, value_name = "NODE")]
    node: Option<String>,
    /// An address: the route that packets to it take; or a network: the routes within it [default: all routes]
    #[arg(value_name = "ADDRESS|NETWORK")]
    destination: Option<String>,
    /// Print JSON (schema crosslane-router-fib/1)
    #[arg(long)]
    json: bool,
}

/// The whole of `crosslane router fib --json`.
#[derive(Serialize)]
struct Report {
    schema: &'static str,
    node: String,
    routes: Vec<Route>,
    /// What was asked for, where it was not all.
    #[serde(skip)]
    destination: Option<String>,
}

/// Prints it.
pub fn main(options: &Options) -> Result<()> {
    let query = query(options.destination.as_deref())?;
    let cluster = LoadedCluster::read(&options.cluster)?;
    let mut found = None;
    for index in cluster.chosen(options.node.as_deref())? {
        if let Some(routes) = routes(&cluster, index, query)? {
            let (node, destination) = (cluster.name(index).to_owned(), options.destination.clone());
            found = Some(Report { schema: "crosslane-router-fib/1", node, routes, destination });
            break;
        }
    }
    let Some(report) = found else {
        let file = cluster.file.shown();
        let node = options.node.as_ref().map_or("no node".to_owned(), |node| format!("node '{node}'"));
        let what = if options.node.is_some() { "is not up" } else { "is up" };
        bail!("{node} of {file} {what}; start it with 'crosslane router up --cluster {file}'");
    };
    if options.json { output::print_json(&report) } else { output::print(&describe(&report)) }
}

fn query(destination: Option<&str>) -> Result<FibQuery> {
    let Some(text) = destination else { return Ok(FibQuery::default()) };
    if let Ok(address) = text.parse::<IpAddr>() {
        return Ok(FibQuery { address: Some(address), ..FibQuery::default() });
    }
    match text.parse::<IpNet>() {
        Ok(within) => Ok(FibQuery { within: Some(within.trunc()), ..FibQuery::default() }),
        Err(_) => {
            let example = "write as in 192.0.2.1, 192.0.2.0/24 or 2001:db8::/32";
            bail!(WrongUse::of(format!("'{text}' is neither an address nor a network; {example}")))
        }
    }
}

/// All that a node has; `None` when it is not up.
fn routes(cluster: &LoadedCluster, index: usize, query: FibQuery) -> Result<Option<Vec<Route>>> {
    let name = cluster.name(index);
    let Some((mut answer, channel)) = request(&cluster.places.node(name), Request::Fib(query))? else {
        return Ok(None);
    };
    let mut all = Vec::new();
    loop {
        let Response::Fib { routes, is_last } = answer else {
            bail!("node '{name}' answers {answer:?} when asked for its routes; use one release for all")
        };
        all.extend(routes);
        if is_last {
            return Ok(Some(all));
        }
        answer = receive(&channel, ANSWER_LIMIT)?.with_context(|| format!("node '{name}' says no more"))?;
    }
}

fn describe(report: &Report) -> String {
    if report.routes.is_empty() {
        return match &report.destination {
            Some(destination) => format!("node {}: no route to {destination}\n", report.node),
            None => format!("node {}: no routes\n", report.node),
        };
    }
    let mut table = Table::new(&[("TO", Align::Left), ("METRIC", Align::Right), ("BY", Align::Left)]);
    for route in &report.routes {
        // A neighbour has none of its own: it stands behind every route.
        let metric = Some(route.metric).filter(|metric| *metric != METRIC_NEIGHBOUR);
        table.row(vec![
            route.to.to_string(),
            metric.map_or_else(|| "-".to_owned(), |metric| metric.to_string()),
            by(route),
        ]);
    }
    format!("node {}\n{}", report.node, table.render())
}

/// What becomes of packets.
fn by(route: &Route) -> String {
    let hops: Vec<String> = route.hops.iter().map(hop).collect();
    match route.kind {
        _ if route.is_left_out => "no room in the tables: packets take a wider route, or none".to_owned(),
        RouteKind::Unicast if hops.is_empty() => "nobody: its nodes are gone".to_owned(),
        RouteKind::Unicast => hops.join(", "),
        RouteKind::Blackhole => "dropped".to_owned(),
        RouteKind::Unreachable => "answered as unreachable".to_owned(),
        RouteKind::Prohibited => "answered as prohibited".to_owned(),
        RouteKind::Throw => "answered as without a route".to_owned(),
    }
}

fn hop(hop: &RouteHop) -> String {
    let RouteHop { node, port, adjacency, weight } = hop;
    let weight = if *weight > 1 { format!(" weight {weight}") } else { String::new() };
    match adjacency {
        0 => format!("{node}:{port}{weight}"),
        adjacency => format!("{node}:{port}#{adjacency}{weight}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn that_there_is_no_route_is_said() {
        let report = |destination: Option<&str>| Report {
            schema: "crosslane-router-fib/1",
            node: "a".to_owned(),
            routes: Vec::new(),
            destination: destination.map(str::to_owned),
        };
        assert_eq!(describe(&report(Some("192.0.2.1"))), "node a: no route to 192.0.2.1\n");
        assert_eq!(describe(&report(None)), "node a: no routes\n");
    }

    #[test]
    fn a_route_that_found_no_room_is_not_shown_as_one_that_forwards() {
        let to = "192.0.2.0/24".parse().unwrap();
        let route = |is_left_out| Route { to, metric: 0, kind: RouteKind::Unicast, hops: Vec::new(), is_left_out };
        assert_eq!(by(&route(true)), "no room in the tables: packets take a wider route, or none");
        assert_eq!(by(&route(false)), "nobody: its nodes are gone");
    }
}
