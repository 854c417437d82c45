// The search of this site opened from a folder: browsers start no worker for a page that has no server.
// Here a hidden frame is the worker. The theme looks for the name, as that of npm's iframe-worker.
class IFrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.append(this.frame);
    const inside = this.frame.contentWindow.document;
    const script = inside.createElement("script");
    script.src = url;
    this.loaded = new Promise((done) => script.addEventListener("load", done, { once: true }));
    this.frame.contentWindow.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    inside.body.append(script);
  }

  postMessage(data) {
    this.loaded.then(() => this.frame.contentWindow?.dispatchEvent(new MessageEvent("message", { data })));
  }

  terminate() {
    this.frame.remove();
  }
}

if (location.protocol === "file:") {
  window.IFrameWorker = IFrameWorker;
  window.Worker = IFrameWorker;
}
