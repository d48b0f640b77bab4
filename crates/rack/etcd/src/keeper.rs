//! What a monitor has of etcd: one thread that keeps its lease, one that watches its rack, and a descriptor that says
//! when there is news. Neither waits for etcd in the monitor's own thread, so etcd may be slow or away.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use rack::{LEASES, RackFile};
use rustix::event::{EventfdFlags, eventfd};

use crate::gateway::Revision;
use crate::lease::{LinkState, Tenure};
use crate::store::Store;
use crate::{Address, EtcdError};

/// How long to wait before etcd is asked again that did not answer.
const RETRY: Duration = Duration::from_secs(1);
/// What changes within this time is written once.
const GATHER: Duration = Duration::from_millis(100);
/// How long the lease may take to be given up at the end.
const END_LIMIT: Duration = Duration::from_millis(1500);
/// A lease is renewed so often in its time.
const SIGNS_PER_TTL: u32 = 3;
/// News that wait, at most: the monitor takes them at once.
const NEWS_MAX: usize = 64;

/// What there is to know.
#[derive(Debug)]
pub enum News {
    /// The rack may have changed.
    Rack(Box<RackFile>),
    /// What lies in etcd is no good rack.
    Refused(EtcdError),
    /// etcd does not answer.
    Away(EtcdError),
    /// It does again.
    Back,
    /// The lease had ended, and is taken anew.
    Renewed,
    /// The lease had ended, and somebody else has the node.
    Taken(EtcdError),
}

enum Order {
    Links(Vec<LinkState>),
    End,
}

/// The threads, as the monitor sees them.
#[derive(Debug)]
pub struct Keeper {
    address: Address,
    orders: Sender<Order>,
    news: Receiver<News>,
    bell: Arc<OwnedFd>,
    /// Ends when the lease is given up.
    ended: Receiver<()>,
}

impl Keeper {
    /// Starts the threads. What the rack was at `revision` is known already.
    ///
    /// # Errors
    /// When the kernel gives no thread or descriptor.
    pub fn start(store: Store, tenure: Tenure, revision: Revision) -> Result<Self, EtcdError> {
        let failed = |reason: String| EtcdError::System { what: "threads for etcd".to_owned(), reason };
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|e| failed(e.to_string()))?;
        let bell = Arc::new(bell);
        let (sender, news) = mpsc::sync_channel(NEWS_MAX);
        let teller = Teller { sender, bell: Arc::clone(&bell) };
        let (orders, taken) = mpsc::channel();
        let (ending, ended) = mpsc::channel();
        let (address, watcher) = (store.address().clone(), teller.clone());
        let spawn = |name: &str, run: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name.to_owned()).spawn(run).map_err(|error| failed(error.to_string()))
        };
        spawn("lease", Box::new(move || keep(tenure, &taken, &teller, ending)))?;
        // It ends with the process, or when nobody is left to hear of changes.
        spawn("watch", Box::new(move || watch(&store, &watcher, revision)))?;
        Ok(Self { address, orders, news, bell, ended })
    }

    /// Where the rack lies.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Polls readable when there is news.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// What has come.
    pub fn news(&self) -> Vec<News> {
        let _ = rustix::io::read(&self.bell, &mut [0_u8; 8]);
        self.news.try_iter().collect()
    }

    /// How this node's links are, for others to see.
    pub fn tell_links(&self, links: Vec<LinkState>) {
        let _ = self.orders.send(Order::Links(links));
    }
}

impl Drop for Keeper {
    /// Gives the node up, unless etcd does not answer: then the lease ends by itself.
    fn drop(&mut self) {
        let _ = self.orders.send(Order::End);
        let _ = self.ended.recv_timeout(END_LIMIT);
    }
}

/// The way to the monitor.
#[derive(Clone)]
struct Teller {
    sender: mpsc::SyncSender<News>,
    bell: Arc<OwnedFd>,
}

impl Teller {
    /// Whether anybody will hear it.
    fn tell(&self, news: News) -> bool {
        let told = self.sender.send(news).is_ok();
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
        told
    }
}

/// The thread that keeps the lease. It drops `ending` when the lease is given up.
fn keep(mut tenure: Tenure, orders: &Receiver<Order>, teller: &Teller, ending: Sender<()>) {
    let period = Duration::from_secs(tenure.ttl_s()) / SIGNS_PER_TTL;
    let (mut is_away, mut is_taken) = (false, false);
    loop {
        let order = orders.recv_timeout(if is_away || is_taken { RETRY } else { period });
        let mut is_ending = !matches!(order, Ok(Order::Links(_)) | Err(RecvTimeoutError::Timeout));
        if let Ok(Order::Links(links)) = order {
            tenure.held.links = links;
            std::thread::sleep(GATHER);
        }
        for order in orders.try_iter() {
            match order {
                Order::Links(links) => tenure.held.links = links,
                Order::End => is_ending = true,
            }
        }
        if is_ending {
            tenure.end();
            return drop(ending);
        }
        let news = match tenure.keep() {
            Ok(is_kept) => {
                let was_away = std::mem::take(&mut is_away);
                is_taken = false;
                [was_away.then_some(News::Back), (!is_kept).then_some(News::Renewed)]
            }
            Err(error @ EtcdError::Taken { .. }) => {
                let was_away = std::mem::take(&mut is_away);
                let was_taken = std::mem::replace(&mut is_taken, true);
                [was_away.then_some(News::Back), (!was_taken).then_some(News::Taken(error))]
            }
            Err(error) => [(!std::mem::replace(&mut is_away, true)).then_some(News::Away(error)), None],
        };
        news.into_iter().flatten().for_each(|news| _ = teller.tell(news));
    }
}

/// The thread that watches the rack, until nobody listens.
fn watch(store: &Store, teller: &Teller, mut seen: Revision) {
    let mut refused = String::new();
    loop {
        if !follow(store, teller, &mut seen, &mut refused) || !look(store, teller, &mut seen, &mut refused) {
            return;
        }
    }
}

/// Follows changes for as long as etcd tells of them; false when nobody listens.
fn follow(store: &Store, teller: &Teller, seen: &mut Revision, refused: &mut String) -> bool {
    let watch = store.gateway.watch(&store.folder(), Revision(seen.0 + 1));
    let Ok(mut watch) = watch else {
        std::thread::sleep(RETRY);
        return true;
    };
    let leases = format!("{}{LEASES}", store.folder());
    // An end without news is usual: a silent connection is not trusted for long.
    while let Ok((revision, keys)) = watch.next() {
        let is_of_rack = |key: &Vec<u8>| !key.starts_with(leases.as_bytes());
        if revision > *seen && keys.iter().any(is_of_rack) && !look(store, teller, seen, refused) {
            return false;
        }
        *seen = revision.max(*seen);
    }
    std::thread::sleep(RETRY);
    true
}

/// Reads the whole rack and tells of it; false when nobody listens.
fn look(store: &Store, teller: &Teller, seen: &mut Revision, refused: &mut String) -> bool {
    match store.load() {
        Ok(stored) => {
            *seen = stored.revision;
            refused.clear();
            teller.tell(News::Rack(Box::new(stored.file)))
        }
        Err(error @ EtcdError::Rack(_)) => {
            // Said once.
            let text = error.to_string();
            let is_new = text != *refused;
            *refused = text;
            !is_new || teller.tell(News::Refused(error))
        }
        // The next look is soon.
        Err(_) => true,
    }
}
