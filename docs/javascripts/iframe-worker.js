// Search in a site that is read from disk. Browsers start no worker from a file, so
// the worker's script runs in a hidden frame instead. Over HTTP nothing changes.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      const load = (address) =>
        new Promise((loaded, failed) => {
          const script = inside.document.createElement("script");
          script.src = new URL(address, location.href);
          script.onload = loaded;
          script.onerror = failed;
          inside.document.body.append(script);
        });
      inside.importScripts = (...addresses) => Promise.all(addresses.map(load));
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        if (this.onmessage) this.onmessage(event);
        this.dispatchEvent(event);
      };
      this.ready = load(url).then(() => inside);
      this.frame = frame;
    }

    postMessage(data) {
      this.ready.then((inside) =>
        inside.dispatchEvent(new inside.MessageEvent("message", { data })),
      );
    }

    terminate() {
      this.frame.remove();
    }
  };
}
