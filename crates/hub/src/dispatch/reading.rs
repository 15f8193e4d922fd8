//! Reading for the feeds: what fan-out hands over, what is new elsewhere, and what each wishes for.

use std::time::Duration;

use chrono::{DateTime, Utc};

use super::{AGAIN_PAUSE, DispatchError, Dispatcher, Ended, flat};
use crate::fanout::Fanned;
use crate::store;
use crate::store::dispatch::{News, Read, Wishes};

/// How often to look for news when nobody in this process tells them.
const NEWS_PAUSE: Duration = Duration::from_millis(20);
const IDLE_NEWS_PAUSE: Duration = Duration::from_millis(100);
/// Subscribers, and lanes, that are read for at a time; so many lanes of one subscriber.
const READS_MAX: usize = 64;
const LANE_READS_MAX: usize = 8;

impl Dispatcher {
    /// Fan-out in this process has made messages.
    pub(super) fn hear(&mut self, fanned: Fanned) {
        if fanned.after != self.told_to || self.version == 0 {
            return; // something lies between: the news tell
        }
        self.told_to = fanned.to;
        self.told_at = tokio::time::Instant::now();
        self.newest_version = self.newest_version.max(fanned.version);
        for (subscriber, mails) in fanned.mails {
            // Else it is another process's, or a new one, which reads for itself once it is known.
            if let Some(feed) = self.feeds.get_mut(&subscriber) {
                feed.hand_over(mails);
                self.hot.insert(subscriber);
            }
        }
    }

    pub(super) fn learn(&mut self, news: News) {
        self.newest_version = self.newest_version.max(news.version);
        if news.newest > self.told_to {
            self.told_to = news.newest;
            self.told_at = tokio::time::Instant::now();
            for subscriber in news.subscribers {
                if let Some(feed) = self.feeds.get_mut(&subscriber) {
                    (feed.behind, feed.commanded) = (true, true);
                    self.hot.insert(subscriber);
                }
            }
        }
    }

    pub(super) fn take_in(&mut self, read: Ended<Read>) -> Result<(), DispatchError> {
        let Some((wishes, _)) = self.reading.take() else { return Ok(()) };
        let mut read = match flat(read) {
            Ok(read) => read,
            Err(error) => {
                for (subscriber, _, _) in wishes.feeds {
                    if let Some(feed) = self.feeds.get_mut(&subscriber) {
                        (feed.reading, feed.behind) = (false, true);
                    }
                }
                for (subscriber, wish) in wishes.lanes {
                    if let Some(feed) = self.feeds.get_mut(&subscriber) {
                        feed.unread(wish);
                    }
                }
                for subscriber in wishes.commands {
                    if let Some(feed) = self.feeds.get_mut(&subscriber) {
                        feed.commanded = true;
                    }
                }
                self.again_at = Some(tokio::time::Instant::now() + AGAIN_PAUSE);
                return Err(error);
            }
        };
        let now = self.clock.now();
        for (subscriber, _, most) in wishes.feeds {
            let mails = read.feeds.remove(&subscriber).unwrap_or_default();
            if let Some(feed) = self.feeds.get_mut(&subscriber) {
                feed.reading = false;
                let complete = mails.len() < most;
                feed.offer(mails, complete);
                self.hot.insert(subscriber);
            }
        }
        for (subscriber, wish) in wishes.lanes {
            let mails = read.lanes.remove(&(subscriber, wish.key.clone())).unwrap_or_default();
            if let Some(feed) = self.feeds.get_mut(&subscriber) {
                feed.offer_lane(&wish, mails);
                self.hot.insert(subscriber);
            }
        }
        for (subscriber, command) in read.commands {
            if let Some(feed) = self.feeds.get_mut(&subscriber) {
                feed.command(command, now);
                self.hot.insert(subscriber);
            }
        }
        Ok(())
    }

    pub(super) fn news_pause(&self) -> Duration {
        if self.told_at.elapsed() > Duration::from_secs(2) { IDLE_NEWS_PAUSE } else { NEWS_PAUSE }
    }

    pub(super) fn read(&mut self, now: DateTime<Utc>) {
        if self.reading.is_some() {
            return;
        }
        let mut wishes = Wishes::default();
        // Each time it is another's turn to be the first.
        self.turn = self.turn.wrapping_add(1);
        let from = self.turn % self.hot.len().max(1);
        for subscriber in self.hot.iter().skip(from).chain(self.hot.iter().take(from)) {
            if wishes.feeds.len().max(wishes.lanes.len()).max(wishes.commands.len()) >= READS_MAX {
                break;
            }
            let Some(feed) = self.feeds.get_mut(subscriber) else { continue };
            if std::mem::take(&mut feed.commanded) {
                wishes.commands.push(*subscriber);
            }
            if let Some((after, most)) = feed.wish() {
                (feed.reading, feed.behind) = (true, false);
                wishes.feeds.push((*subscriber, after, most));
            }
            let most = LANE_READS_MAX.min(READS_MAX - wishes.lanes.len());
            wishes.lanes.extend(feed.lane_wishes(now, most).into_iter().map(|wish| (*subscriber, wish)));
        }
        if wishes.feeds.is_empty() && wishes.lanes.is_empty() && wishes.commands.is_empty() {
            return;
        }
        let (db, wished) = (self.db.clone(), wishes.clone());
        let reading = tokio::spawn(async move { store::dispatch::read(&db, &wished).await });
        self.reading = Some((wishes, reading));
    }

    pub(super) fn ask(&mut self) {
        if self.asking.is_some() || self.version == 0 || self.told_at.max(self.asked_at).elapsed() < self.news_pause() {
            return;
        }
        self.asked_at = tokio::time::Instant::now();
        let (db, after) = (self.db.clone(), self.told_to);
        self.asking = Some(tokio::spawn(async move { store::dispatch::news(&db, after).await }));
    }
}
